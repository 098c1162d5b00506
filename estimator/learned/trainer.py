"""Fits the model of remaining work: the only module that imports scikit-learn.

In a process of its own ``main`` reads past jobs (msgpack) from standard input and writes a model
(JSON) to standard output, at low priority: so the core never loads the library.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from estimator.learned.concordance import Concordance
from estimator.learned.job_history import PastJob, remaining_work, rows_of
from estimator.learned.trees import LEAF, Trees
from estimator.learned.work_model import WorkModel, encode_model
from estimator.plain_math import log

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sklearn.ensemble import GradientBoostingRegressor

    Array = NDArray[np.float64]

MIN_JOBS = 8
"""Fewer ended jobs teach nothing."""
NUM_TOOLS = 8
"""The commonest tools are counted each by itself."""
NUM_FOLDS = 5
NUM_TREES = 120
NUM_LEAVES = 7
STEP = 0.05
LEAF_TURNS = 20
"""Small trees and many turns to a leaf: jobs are few, and the turns of one job resemble each other."""
SUBSAMPLE = 0.5
MAX_TURNS = 20_000
"""Turns that are learned from; of more, whole jobs from the last one backwards."""
NICENESS = 15


def fit(jobs: Sequence[PastJob]) -> WorkModel | None:
    """A model of all jobs, judged by folds of groups; None of fewer than ``MIN_JOBS``."""
    jobs = _latest([job for job in jobs if job.turns])
    if len(jobs) < MIN_JOBS:
        return None
    tools = _vocabulary(jobs)
    rows, logs, owners = _examples(jobs, tools)
    judged = _judge(jobs, rows, logs, owners)
    return WorkModel(
        trees=_export(_fit(rows, logs)),
        tools=tools,
        usual=float(logs.mean()),
        num_jobs=len(jobs),
        num_turns=len(rows),
        right=judged.right,
        right_by_age=judged.right_by_age,
    )


def _latest(jobs: Sequence[PastJob]) -> list[PastJob]:
    kept: list[PastJob] = []
    num_turns = 0
    for job in reversed(jobs):
        num_turns += len(job.turns)
        if num_turns > MAX_TURNS and kept:
            break
        kept.append(job)
    return kept[::-1]


def _examples(jobs: Sequence[PastJob], tools: Sequence[str]) -> tuple[Array, Array, NDArray[np.int64]]:
    """Of each turn its row [num_turns, num_features], the logarithm of the work that its job still had
    [num_turns], and which job that is [num_turns]."""
    rows = np.array([row for job in jobs for row in rows_of(job, tools)])
    logs = np.array([log(1.0 + work) for job in jobs for work in remaining_work(job)])
    return rows, logs, np.repeat(np.arange(len(jobs)), [len(job.turns) for job in jobs])


def _vocabulary(jobs: Sequence[PastJob]) -> list[str]:
    counts = Counter(tool for job in jobs for turn in job.turns for tool in turn.tools)
    return sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:NUM_TOOLS]


def _fit(rows: Array, logs: Array) -> GradientBoostingRegressor:
    from sklearn.ensemble import GradientBoostingRegressor

    model = GradientBoostingRegressor(
        n_estimators=NUM_TREES,
        learning_rate=STEP,
        max_leaf_nodes=NUM_LEAVES,
        min_samples_leaf=min(LEAF_TURNS, max(1, len(rows) // 10)),
        subsample=SUBSAMPLE,
        random_state=0,
    )
    return model.fit(rows, logs)


def _judge(jobs: Sequence[PastJob], rows: Array, logs: Array, owners: NDArray[np.int64]) -> Concordance:
    """How many pairs a model orders rightly of jobs whose groups it did not learn from."""
    groups = sorted({job.group for job in jobs})
    fold_of = {group: number % NUM_FOLDS for number, group in enumerate(groups)}
    folds = np.array([fold_of[jobs[owner].group] for owner in owners])
    predicted = np.full(len(rows), logs.mean())
    for fold in range(NUM_FOLDS):
        held_out = folds == fold
        if held_out.any() and not held_out.all():
            predicted[held_out] = _fit(rows[~held_out], logs[~held_out]).predict(rows[held_out])
    return _concordance(predicted, rows[:, 0], logs, owners)


def judge(model: WorkModel, jobs: Sequence[PastJob]) -> Concordance:
    """How many pairs of these jobs, which it did not learn from, a model orders rightly."""
    rows, logs, owners = _examples(jobs, model.tools)
    predicted = np.array([model.trees.predict(row) for row in rows.tolist()])
    return _concordance(predicted, rows[:, 0], logs, owners)


def _concordance(predicted: Array, turns: Array, logs: Array, owners: NDArray[np.int64]) -> Concordance:
    judged = Concordance()
    draw = np.random.default_rng(0).integers(0, len(logs), (2, 20_000))
    for one, other in draw.T:
        if owners[one] != owners[other]:
            judged.add(
                float(predicted[one] - predicted[other]),
                float(turns[other] - turns[one]),
                float(logs[one] - logs[other]),
            )
    return judged


def _export(model: GradientBoostingRegressor) -> Trees:
    """The fitted trees as arrays, by the public attributes of scikit-learn's trees."""
    roots: list[int] = []
    features: list[int] = []
    thresholds: list[float] = []
    left: list[int] = []
    right: list[int] = []
    values: list[float] = []
    for estimator in model.estimators_[:, 0]:
        tree, first = estimator.tree_, len(features)
        roots.append(first)
        is_leaf = tree.children_left < 0
        features += np.where(is_leaf, LEAF, tree.feature).tolist()
        thresholds += np.where(is_leaf, 0.0, tree.threshold).tolist()
        left += np.where(is_leaf, 0, tree.children_left + first).tolist()
        right += np.where(is_leaf, 0, tree.children_right + first).tolist()
        values += (model.learning_rate * tree.value[:, 0, 0]).tolist()
    return Trees(float(model.init_.constant_[0, 0]), roots, features, thresholds, left, right, values)


def main() -> None:
    """Where there are too few jobs nothing is written."""
    os.nice(NICENESS)
    jobs = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=list[PastJob])
    model = fit(jobs)
    if model is not None:
        sys.stdout.buffer.write(encode_model(model))

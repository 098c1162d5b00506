"""Fits the model of jobs' remaining work, and scores it on held-out jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from estimator.learned.boosting import Size, export, fit, fit_held_out, folds_of
from estimator.learned.concordance import Concordance
from estimator.learned.job_history import PastJob, remaining_work, rows_of
from estimator.learned.work_model import WorkModel
from estimator.plain_math import log

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

MIN_JOBS = 8
"""Minimum number of ended jobs to learn from."""
NUM_TOOLS = 8
"""Number of the most common tools whose calls are counted separately."""
NUM_FOLDS = 5
SIZE = Size(num_trees=120, num_leaves=7, leaf_rows=20)
MAX_TURNS = 20_000
"""Maximum number of turns to learn from; of more, the latest whole jobs are used."""


def fit_work(jobs: Sequence[PastJob]) -> WorkModel | None:
    """Fits a model of all jobs, scored by folds of groups; None for fewer than ``MIN_JOBS``."""
    jobs = _latest([job for job in jobs if job.turns])
    if len(jobs) < MIN_JOBS:
        return None
    tools = _vocabulary(jobs)
    rows, logs, owners = _examples(jobs, tools)
    judged = _judge(jobs, rows, logs, owners)
    return WorkModel(
        trees=export(fit(rows, logs, SIZE)),
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
    """Returns for each turn its row [num_turns, num_features], the logarithm of its job's remaining work
    [num_turns], and the index of that job [num_turns]."""
    rows = np.array([row for job in jobs for row in rows_of(job, tools)])
    logs = np.array([log(1.0 + work) for job in jobs for work in remaining_work(job)])
    return rows, logs, np.repeat(np.arange(len(jobs)), [len(job.turns) for job in jobs])


def _vocabulary(jobs: Sequence[PastJob]) -> list[str]:
    counts = Counter(tool for job in jobs for turn in job.turns for tool in turn.tools)
    return sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:NUM_TOOLS]


def _judge(jobs: Sequence[PastJob], rows: Array, logs: Array, owners: NDArray[np.int64]) -> Concordance:
    """Scores how well models order pairs of jobs from groups that they did not learn from."""
    folds = folds_of([jobs[owner].group for owner in owners], NUM_FOLDS)
    predicted = fit_held_out(rows, logs, folds, SIZE)
    if predicted is None:
        predicted = np.full(len(rows), logs.mean())
    return _concordance(predicted, rows[:, 0], logs, owners)


def judge(model: WorkModel, jobs: Sequence[PastJob]) -> Concordance:
    """Scores how well a model orders pairs of these jobs, which it must not have learned from."""
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

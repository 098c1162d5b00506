"""Fits the correction of calls' durations, and scores it on held-out calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from estimator.learned.boosting import Size, export, fit, fit_held_out, folds_of
from estimator.learned.call_history import LEVELS, PastCall
from estimator.learned.duration_model import MAX_KINDS, DurationModel, KindLoss

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

MIN_CALLS = 100
"""Minimum number of ended calls to learn from."""
MIN_OF_KIND = 20
"""A tool with fewer calls gets the score of all calls."""
MAX_CALLS = 10_000
"""Maximum number of calls to learn from; of more, an evenly spaced subset is used."""
NUM_FOLDS = 3
SIZE = Size(num_trees=60, num_leaves=5, leaf_rows=40)


def fit_durations(calls: Sequence[PastCall]) -> DurationModel | None:
    """Fits a model of these calls, scored by folds of groups; None for fewer than ``MIN_CALLS``."""
    if len(calls) < MIN_CALLS:
        return None
    if len(calls) > MAX_CALLS:
        calls = [calls[place * len(calls) // MAX_CALLS] for place in range(MAX_CALLS)]
    rows = np.array([call.row for call in calls])
    logs = np.array([call.log_s for call in calls])
    before = rows[:, : len(LEVELS)]
    after = _held_out(rows, logs, folds_of([call.group for call in calls], NUM_FOLDS))
    losses = _losses(logs, after)
    losses_without = _losses(logs, before)
    return DurationModel(
        trees=[export(fit(rows, logs - before[:, place], SIZE, level)) for place, level in enumerate(LEVELS)],
        num_calls=len(calls),
        loss=float(losses.mean()),
        loss_without=float(losses_without.mean()),
        kinds=_by_kind([call.kind for call in calls], losses, losses_without),
    )


def _held_out(rows: Array, logs: Array, folds: NDArray[np.int64]) -> Array:
    """The corrected logarithms of each call's quantiles, by a model of the other folds; uncorrected if there
    is only one fold. [num_calls, num_levels]"""
    after = rows[:, : len(LEVELS)].copy()
    for place, level in enumerate(LEVELS):
        predicted = fit_held_out(rows, logs - rows[:, place], folds, SIZE, level)
        if predicted is not None:
            after[:, place] += predicted
    corrected: Array = np.maximum.accumulate(after, axis=1)
    return corrected


def _losses(logs: Array, quantiles: Array) -> Array:
    """Mean pinball loss of each call over the levels: [num_calls]."""
    above = logs[:, None] - quantiles
    levels = np.array(LEVELS)
    losses: Array = np.maximum(levels * above, (levels - 1) * above).mean(axis=1)
    return losses


def _by_kind(kinds: Sequence[str], losses: Array, losses_without: Array) -> list[KindLoss]:
    found = []
    names = np.array(kinds)
    for kind, num_calls in Counter(kinds).most_common(MAX_KINDS):
        if num_calls >= MIN_OF_KIND:
            at = names == kind
            found.append(KindLoss(kind, float(losses[at].mean()), float(losses_without[at].mean())))
    return found

"""Fits the correction of calls' durations, and judges it by calls that it did not learn from."""

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
"""Fewer ended calls teach nothing."""
MIN_OF_KIND = 20
"""A tool with fewer is judged as all calls are."""
MAX_CALLS = 10_000
"""Calls that are learned from; of more, as many evenly among them."""
NUM_FOLDS = 3
SIZE = Size(num_trees=60, num_leaves=5, leaf_rows=40)


def fit_durations(calls: Sequence[PastCall]) -> DurationModel | None:
    """A model of these calls, judged by folds of groups; None of fewer than ``MIN_CALLS``."""
    if len(calls) < MIN_CALLS:
        return None
    if len(calls) > MAX_CALLS:
        calls = [calls[place * len(calls) // MAX_CALLS] for place in range(MAX_CALLS)]
    rows, logs = np.array([call.row for call in calls]), np.array([call.log_s for call in calls])
    before = rows[:, : len(LEVELS)]
    after = _held_out(rows, logs, folds_of([call.group for call in calls], NUM_FOLDS))
    losses, losses_without = _losses(logs, after), _losses(logs, before)
    return DurationModel(
        trees=[export(fit(rows, logs - before[:, place], SIZE, level)) for place, level in enumerate(LEVELS)],
        num_calls=len(calls),
        loss=float(losses.mean()),
        loss_without=float(losses_without.mean()),
        kinds=_by_kind([call.kind for call in calls], losses, losses_without),
    )


def _held_out(rows: Array, logs: Array, folds: NDArray[np.int64]) -> Array:
    """The corrected logarithms of the quantiles of each call, by a model of the other folds: as they
    were where there is no other. [num_calls, num_levels]"""
    after = rows[:, : len(LEVELS)].copy()
    for place, level in enumerate(LEVELS):
        predicted = fit_held_out(rows, logs - rows[:, place], folds, SIZE, level)
        if predicted is not None:
            after[:, place] += predicted
    corrected: Array = np.maximum.accumulate(after, axis=1)
    return corrected


def _losses(logs: Array, quantiles: Array) -> Array:
    """Mean pinball loss of each call over the levels: [num_calls]."""
    above, levels = logs[:, None] - quantiles, np.array(LEVELS)
    losses: Array = np.maximum(levels * above, (levels - 1) * above).mean(axis=1)
    return losses


def _by_kind(kinds: Sequence[str], losses: Array, losses_without: Array) -> list[KindLoss]:
    found, names = [], np.array(kinds)
    for kind, num_calls in Counter(kinds).most_common(MAX_KINDS):
        if num_calls >= MIN_OF_KIND:
            at = names == kind
            found.append(KindLoss(kind, float(losses[at].mean()), float(losses_without[at].mean())))
    return found

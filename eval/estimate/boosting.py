"""A learned regressor to compare with: gradient boosted quantiles of the log duration (scikit-learn).

A server never loads scikit-learn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from eval.estimate.calls import Call, Played
from eval.estimate.predictors import LEVELS, FloatArray
from eval.estimate.scores import LOG_FLOOR_S

if TYPE_CHECKING:
    from sklearn.ensemble import HistGradientBoostingRegressor

FITTED = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""Quantiles with a model each; the levels between are interpolated in log seconds."""
MAX_CATEGORIES = 200
"""Number of kinds of call; rarer ones share one category. The regressor takes at most 255."""
MAX_LEAVES = 7
"""Small trees: with scikit-learn's own 31 the quantiles are too narrow."""


def is_installed() -> bool:
    return find_spec("sklearn") is not None


def one_thread() -> AbstractContextManager[object]:
    """Limit to one thread: with few rows, threads mostly wait for each other, longest on busy CPUs."""
    import sklearn.ensemble  # a library that is not loaded yet cannot be limited
    from threadpoolctl import threadpool_limits

    assert sklearn.ensemble
    limits: AbstractContextManager[object] = threadpool_limits(1, "openmp")
    return limits


class BoostedQuantiles:
    """Uses more features than the tables: kind of call, position in the job, tokens, parallel calls, and of
    the job's earlier calls of the same kind the number, the last, the mean and the longest."""

    def __init__(self) -> None:
        self._models: list[HistGradientBoostingRegressor] = []
        self._categories: dict[str, int] = {}

    def fit(self, jobs: Sequence[Played], progress: Callable[[str], None]) -> None:
        """Learn from all calls of ended jobs, at least one; ``progress`` gets a line per model."""
        from sklearn.ensemble import HistGradientBoostingRegressor

        for name in (name for job in jobs for call in job.calls for name in _names(call)):
            if len(self._categories) < MAX_CATEGORIES:
                self._categories.setdefault(name, len(self._categories))
        rows, seconds = self._rows(jobs), np.array([call.seconds for job in jobs for call in job.calls])
        for level in FITTED:
            progress(f"boosting the {level} quantile of {len(rows):,} calls")
            model = HistGradientBoostingRegressor(
                loss="quantile",
                quantile=level,
                categorical_features=[0, 1, 2],
                max_leaf_nodes=MAX_LEAVES,
                early_stopping=True,
                random_state=0,
            )
            self._models.append(model.fit(rows, np.log(seconds + LOG_FLOOR_S)))

    def predict(self, jobs: Sequence[Played]) -> list[FloatArray]:
        """The quantiles at ``LEVELS`` of each call, given the calls that ended before it in its job."""
        rows = self._rows(jobs)
        if not len(rows):
            return []
        fitted = np.stack([model.predict(rows) for model in self._models], axis=1)
        fitted = np.maximum.accumulate(fitted, axis=1)
        return [np.maximum(np.exp(np.interp(LEVELS, FITTED, row)) - LOG_FLOOR_S, 0.0) for row in fitted]

    def _rows(self, jobs: Sequence[Played]) -> FloatArray:
        return np.array([row for job in jobs for row in self._rows_of(job)])

    def _rows_of(self, job: Played) -> list[list[float]]:
        history: dict[str, list[float]] = {}
        rows = []
        for turn in job.turns:
            rows += [self._row(call, history) for call in turn.calls]
            for call in turn.calls:
                for name in (*_names(call), ""):
                    history.setdefault(name, []).append(math.log(call.seconds + LOG_FLOOR_S))
        return rows

    def _row(self, call: Call, history: dict[str, list[float]]) -> list[float]:
        names = _names(call)
        row = [float(self._categories.get(name, math.nan)) for name in names]
        row += [call.turn_index, math.log1p(call.input_tokens), math.log1p(call.output_tokens)]
        row.append(call.num_parallel)
        for name in (*names[1:], ""):
            seen = history.get(name)
            row += [len(seen), seen[-1], sum(seen) / len(seen), max(seen)] if seen else [0, *[math.nan] * 3]
        return row


def _names(call: Call) -> tuple[str, str, str]:
    return call.tool, f"{call.program} ", f"{call.key}  "  # kept apart even if spelled alike

"""Online predictors of tool times: each predicts before a call, and learns its time afterwards."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from estimator.durations import DurationEstimator
from estimator.state import restore, snapshot
from estimator.survival import SurvivalCurve, max_of
from estimator.tenants import Learned
from eval.learn.calls import Call, Played

FloatArray = NDArray[np.float64]

LEVELS = tuple(round(0.05 * step, 2) for step in range(1, 20))
"""The quantiles that are predicted."""


class Predictor(Protocol):
    """Predicts the calls of running jobs, and learns from those that ended."""

    def predict(self, call: Call, job_id: str) -> FloatArray | None:
        """The quantiles at ``LEVELS``, in seconds, of a call that begins; None without data."""

    def learn(self, call: Call, job_id: str, censored: bool = False) -> None:
        """Learn that the call took ``call.seconds``; ``censored``: at least that long."""

    def fork(self) -> Self:
        """A copy with the same data of ended jobs, which learns independently."""


def study(predictor: Predictor, jobs: Iterable[Played]) -> None:
    """Learns all calls of ended jobs."""
    for job in jobs:
        for call in job.calls:
            predictor.learn(call, job.job_id)


def play(predictor: Predictor, job: Played) -> list[FloatArray | None]:
    """Returns the prediction for each call of a job, which is learned afterwards.

    Calls of one turn run in parallel: none of them has ended when they are predicted.
    """
    told: list[FloatArray | None] = []
    for turn in job.turns:
        told += [predictor.predict(call, job.job_id) for call in turn.calls]
        for call in turn.calls:
            predictor.learn(call, job.job_id)
    return told


class EmpiricalQuantiles:
    """Empirical quantiles of the calls with the same name, with linear interpolation.

    Censored calls are left out. ``names``: the names of a call, the most specific first; the first one with
    data is used.
    """

    def __init__(self, names: Callable[[Call], Sequence[object]]) -> None:
        self._names = names
        self._seconds: dict[object, list[float]] = {}

    def predict(self, call: Call, job_id: str) -> FloatArray | None:
        seen = next((self._seconds[name] for name in self._names(call) if name in self._seconds), None)
        if seen is None:
            return None
        return np.array([_interpolated(seen, level) for level in LEVELS])

    def learn(self, call: Call, job_id: str, censored: bool = False) -> None:
        if not censored:
            for name in self._names(call):
                insort(self._seconds.setdefault(name, []), call.seconds)

    def fork(self) -> Self:
        copy = type(self)(self._names)
        copy._seconds = {name: list(seconds) for name, seconds in self._seconds.items()}
        return copy


def _interpolated(ordered: Sequence[float], level: float) -> float:
    place = level * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def of_all_calls(_: Call) -> Sequence[object]:
    return ((),)


def of_its_tool(call: Call) -> Sequence[object]:
    return (call.tool, ())


def of_its_class(call: Call) -> Sequence[object]:
    return call.key.chain()


class EstimatorQuantiles:
    """The estimator that the server uses.

    ``jobs``: whether a job's own calls count for it. ``censoring``: whether censored calls are learned as
    such or left out. A quantile in the unknown tail of a curve is the longest time that any call was seen to
    last (Efron's convention for Kaplan and Meier's estimate, Berkeley Symposium 5, 1967).
    """

    def __init__(self, jobs: bool = True, censoring: bool = True) -> None:
        self._jobs = jobs
        self._censoring = censoring
        self._estimator = DurationEstimator()
        self._longest_s = 0.0

    def predict(self, call: Call, job_id: str) -> FloatArray | None:
        return self._quantiles(self._curve(call, job_id))

    def predict_last(self, calls: Sequence[Call], job_id: str) -> FloatArray | None:
        """The quantiles of the time until the last of several parallel calls has ended."""
        return self._quantiles(max_of([self._curve(call, job_id) for call in calls]))

    def learn(self, call: Call, job_id: str, censored: bool = False) -> None:
        if self._censoring or not censored:
            job = job_id if self._jobs else None
            self._longest_s = max(self._longest_s, call.seconds)
            self._estimator.observe(call.key, call.seconds, censored, job=job)

    def fork(self) -> Self:
        # Uses the format of the state file, like a restart: details of other jobs are not needed.
        copy = type(self)()
        copy._jobs = self._jobs
        copy._censoring = self._censoring
        copy._longest_s = self._longest_s
        copy._estimator = restore(snapshot(Learned(self._estimator))).durations
        return copy

    def _curve(self, call: Call, job_id: str) -> SurvivalCurve:
        return self._estimator.survival(call.key, job_id if self._jobs else None)

    def _quantiles(self, curve: SurvivalCurve) -> FloatArray | None:
        if curve.num_observations == 0:
            return None
        quantiles = np.array([curve.quantile(level) for level in LEVELS])
        return np.where(np.isinf(quantiles), self._longest_s, quantiles)

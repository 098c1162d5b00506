"""The estimator's learning and answering times on this machine; the only part of a result that varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns

import msgspec
import numpy as np

from benchmarks.estimate.learned import LearnedQuantiles
from estimator.durations import DurationEstimator
from estimator.tool_key import ToolKey
from eval.learn.calls import Call, Played

CUT_OFF_EVERY = 10
"""One call in this many is learned as censored, in the run that measures their cost."""
MAX_CALLS = 5000
"""Number of calls timed, enough for a quantile."""


class Microseconds(msgspec.Struct, frozen=True):
    """Times of single calls of a function."""

    median: float
    p95: float


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Timings in which every call is predicted, then learned, so that no cached answer is measured."""

    num_calls: int
    observe: Microseconds
    answer: Microseconds
    """Time to compute the survival curve of a call that begins, and its median."""
    answer_with_cut_off: Microseconds
    """The same where one call in ten is learned as censored."""
    observe_when_full: Microseconds
    answer_when_full: Microseconds
    """The same with the maximum number of kinds of call and jobs."""
    answer_corrected: Microseconds | None
    """The same with a learned correction on top; None if none was learned."""


def measure(jobs: Sequence[Played], learned: LearnedQuantiles | None) -> Timing:
    """Replays the jobs one after another and times each call."""
    few = _first(jobs)
    observe, answer = _times(few, DurationEstimator())
    _, answer_with_cut_off = _times(few, DurationEstimator(), cut_off=True)
    observe_when_full, answer_when_full = _times(few, _full_estimator())
    return Timing(
        num_calls=len(answer),
        observe=_microseconds(observe),
        answer=_microseconds(answer),
        answer_with_cut_off=_microseconds(answer_with_cut_off),
        observe_when_full=_microseconds(observe_when_full),
        answer_when_full=_microseconds(answer_when_full),
        answer_corrected=None if learned is None else _microseconds(_corrected_times(few, learned)),
    )


def _first(jobs: Sequence[Played]) -> list[Played]:
    kept: list[Played] = []
    num_calls = 0
    for job in jobs:
        if num_calls >= MAX_CALLS:
            break
        kept.append(job)
        num_calls += len(job.calls)
    return kept


def _full_estimator() -> DurationEstimator:
    estimator = DurationEstimator()
    for number in range(max(estimator.max_keys, estimator.max_job_keys)):
        estimator.observe(ToolKey(("tool", f"program{number}")), 1.0, job=f"other job {number}")
    return estimator


def _times(
    jobs: Sequence[Played], estimator: DurationEstimator, cut_off: bool = False
) -> tuple[list[int], list[int]]:
    """Nanoseconds of each observation and of each answer."""
    observe = []
    answer = []
    for job in jobs:
        for number, call in enumerate(job.calls):
            answer.append(_ns(_median_s, estimator, call.key, job.job_id))
            censored = cut_off and number % CUT_OFF_EVERY == 0
            observe.append(_ns(_observe, estimator, call.key, call.seconds, censored, job.job_id))
    return observe, answer


def _median_s(estimator: DurationEstimator, key: ToolKey, job_id: str) -> float:
    return estimator.survival(key, job_id).median_remaining(0.0)


def _observe(estimator: DurationEstimator, key: ToolKey, seconds: float, censored: bool, job_id: str) -> None:
    estimator.observe(key, seconds, censored, job=job_id)


def _corrected_times(jobs: Sequence[Played], learned: LearnedQuantiles) -> list[int]:
    times = []
    for job in jobs:
        for call in job.calls:
            times.append(_ns(_corrected_median_s, learned, call, job.job_id))
            learned.learn(call, job.job_id)
    return times


def _corrected_median_s(learned: LearnedQuantiles, call: Call, job_id: str) -> float:
    return learned.curve(call, job_id).median_remaining(0.0)


def _ns(function: Callable[..., object], *arguments: object) -> int:
    began = perf_counter_ns()
    function(*arguments)
    return perf_counter_ns() - began


def _microseconds(times_ns: Sequence[int]) -> Microseconds:
    median, p95 = np.quantile(np.array(times_ns) / 1000, [0.5, 0.95])
    return Microseconds(round(float(median), 2), round(float(p95), 2))

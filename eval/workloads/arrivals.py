"""Arrival times of jobs. A simulation and a load generator use the same times for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from eval.errors import UsageError, WorkloadError
from eval.workloads.families import roots
from eval.workloads.job import Job


class ArrivalKind(StrEnum):
    """A process by which root jobs arrive; sub-agents begin when their parents start them."""

    AT_ONCE = "at-once"
    """All jobs arrive at the start."""
    POISSON = "poisson"
    """Independent of each other, at a mean rate."""
    BURSTY = "bursty"
    """Arrivals at a mean rate, with gamma-distributed times between them."""
    RECORDED = "recorded"
    """Arrivals as in the recording, scaled to a rate if one is given."""
    CLOSED = "closed"
    """A fixed number of jobs at once: a job starts when another one ends."""


LEAST_CV = 0.01
MOST_CV = 100.0
"""Limits of bursty arrivals: below they are regular as a clock, above nearly all arrive at once."""
ARRIVALS = tuple(kind.value for kind in ArrivalKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """An arrival process with its parameters. UsageError for a combination without effect."""

    kind: ArrivalKind = ArrivalKind.AT_ONCE
    rate_per_s: float | None = None
    """Mean arrivals per second."""
    cv: float = 1.0
    """Coefficient of variation of the inter-arrival times of bursty arrivals; 1 is Poisson."""
    concurrency: int | None = None
    """Most jobs at once; None means all. With a bound, jobs of an open process wait for a place."""
    recorded_s: tuple[float, ...] = ()
    """Arrivals of another recording, used for jobs without arrivals."""

    def __post_init__(self) -> None:
        needs_rate = self.kind in (ArrivalKind.POISSON, ArrivalKind.BURSTY)
        if needs_rate and self.rate_per_s is None:
            raise UsageError(f"--arrivals {self.kind.value} needs --rate, in jobs per second.")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < float("inf"):
            raise UsageError(f"--rate must be above 0 jobs per second, got {self.rate_per_s:g}.")
        if self.rate_per_s is not None and self.kind in (ArrivalKind.AT_ONCE, ArrivalKind.CLOSED):
            raise UsageError(f"--rate has no effect with --arrivals {self.kind.value}.")
        if not LEAST_CV <= self.cv <= MOST_CV:
            told = f"from {LEAST_CV:g} to {MOST_CV:g}"
            raise UsageError(f"--burstiness must be {told}, got {self.cv:g}.")
        if self.cv != 1 and self.kind is not ArrivalKind.BURSTY:
            raise UsageError(
                f"--burstiness has no effect with --arrivals {self.kind.value}, only with bursty."
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise UsageError(f"--concurrency must be at least 1, got {self.concurrency}.")
        if self.kind is ArrivalKind.CLOSED and self.concurrency is None:
            raise UsageError("--arrivals closed needs --concurrency, the number of jobs at once.")

    def times_s(self, jobs: Sequence[Job], seed: int) -> list[float]:
        """Returns when each root job of ``jobs`` (those that no other starts) arrives, in their order; the
        earliest at 0.

        The times of a seed do not depend on how many jobs there are.
        """
        return _TIMES[self.kind](self, roots(jobs), random.Random(f"{self.kind.value} arrivals {seed}"))

    @property
    def pattern(self) -> str | None:
        """Describes what rate and concurrency leave open; results of one load must have the same pattern."""
        if self.kind is ArrivalKind.BURSTY:
            return f"bursty (variation {self.cv:g})"
        return self.kind.value if self.kind is ArrivalKind.RECORDED else None

    def describe(self) -> str:
        """Returns one line for the report."""
        bound = "" if self.concurrency is None else f", at most {self.concurrency} at once"
        rate = "" if self.rate_per_s is None else f" at {self.rate_per_s:g} per s"
        match self.kind:
            case ArrivalKind.AT_ONCE:
                told = "ASSUMED, all at the start"
            case ArrivalKind.POISSON:
                told = f"ASSUMED, Poisson{rate}"
            case ArrivalKind.BURSTY:
                told = f"ASSUMED, bursty{rate} (gamma, coefficient of variation {self.cv:g})"
            case ArrivalKind.RECORDED:
                source = "measured" if not self.recorded_s else "ASSUMED, those of another recording"
                told = f"{source}, scaled{rate.replace(' at', ' to')}" if rate else source
            case ArrivalKind.CLOSED:
                told = f"ASSUMED, closed loop of {self.concurrency} jobs"
                bound = ""
        return f"job arrivals: {told}{bound}"


def _at_once(arrivals: Arrivals, jobs: Sequence[Job], rng: random.Random) -> list[float]:
    return [0.0] * len(jobs)


def _poisson(arrivals: Arrivals, jobs: Sequence[Job], rng: random.Random) -> list[float]:
    assert arrivals.rate_per_s is not None
    rate_per_s = arrivals.rate_per_s
    return _summed(len(jobs), lambda: rng.expovariate(rate_per_s))


def _bursty(arrivals: Arrivals, jobs: Sequence[Job], rng: random.Random) -> list[float]:
    """Draws a renewal process with gamma-distributed intervals: shape 1 / cv^2, mean 1 / rate.

    As in AlpaServe (Li et al., OSDI 2023, section 6) and ``vllm bench serve --burstiness`` (which is the
    shape).
    """
    assert arrivals.rate_per_s is not None
    shape = 1 / arrivals.cv**2
    scale = 1 / (arrivals.rate_per_s * shape)
    return _summed(len(jobs), lambda: rng.gammavariate(shape, scale))


def _recorded(arrivals: Arrivals, jobs: Sequence[Job], rng: random.Random) -> list[float]:
    times_s = list(arrivals.recorded_s[: len(jobs)]) if arrivals.recorded_s else _own_times_s(jobs)
    if len(times_s) < len(jobs):
        raise WorkloadError(f"{len(jobs)} jobs, but only {len(times_s)} recorded arrivals.")
    first_s = min(times_s, default=0.0)
    last_s = max(times_s, default=0.0)
    scale = 1.0
    if arrivals.rate_per_s is not None and last_s > first_s:
        scale = (len(times_s) - 1) / (last_s - first_s) / arrivals.rate_per_s
    return [(time_s - first_s) * scale for time_s in times_s]


def _own_times_s(jobs: Sequence[Job]) -> list[float]:
    times_s: list[float] = []
    for job in jobs:
        if job.arrival_s is None:
            raise WorkloadError(f"Job {job.job_id} has no recorded arrival; choose another kind of arrivals.")
        times_s.append(job.arrival_s)
    return times_s


def _summed(num_times: int, interval_s: Callable[[], float]) -> list[float]:
    """Returns times with these intervals between them, starting at 0."""
    times_s: list[float] = []
    now = 0.0
    for _ in range(num_times):
        times_s.append(now)
        now += interval_s()
    return times_s


_TIMES: dict[ArrivalKind, Callable[[Arrivals, Sequence[Job], random.Random], list[float]]] = {
    ArrivalKind.AT_ONCE: _at_once,
    ArrivalKind.POISSON: _poisson,
    ArrivalKind.BURSTY: _bursty,
    ArrivalKind.RECORDED: _recorded,
    ArrivalKind.CLOSED: _at_once,
}

"""Arrivals have the requested process and rate, and are equal for equal seeds."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.errors import UsageError, WorkloadError
from eval.workloads.arrivals import ARRIVALS, ArrivalKind, Arrivals
from tests.eval.workloads.jobs import job

JOBS = [job(str(number), arrival_s=100.0 + 5 * number) for number in range(20_000)]

LEGAL = [
    Arrivals(),
    Arrivals(kind=ArrivalKind.POISSON, rate_per_s=0.2),
    Arrivals(kind=ArrivalKind.BURSTY, rate_per_s=0.2, cv=4.0),
    Arrivals(kind=ArrivalKind.RECORDED),
    Arrivals(kind=ArrivalKind.RECORDED, rate_per_s=3.0),
    Arrivals(kind=ArrivalKind.CLOSED, concurrency=8),
]


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("bursty", 0.5), ("bursty", 3.0)])
def test_rate_and_burstiness_are_those_asked_for(kind: str, cv: float) -> None:
    """Times between arrivals have mean 1 / rate and the requested coefficient of variation."""
    times_s = Arrivals(kind=ArrivalKind(kind), rate_per_s=0.5, cv=cv).times_s(JOBS, seed=3)
    between = [after - before for before, after in pairwise(times_s)]
    assert times_s[0] == 0
    assert statistics.fmean(between) == pytest.approx(2.0, rel=0.05)
    assert statistics.stdev(between) / statistics.fmean(between) == pytest.approx(cv, rel=0.05)


@given(arrivals=st.sampled_from(LEGAL), seed=st.integers(0, 2**32), num_jobs=st.integers(0, 30))
def test_arrivals_depend_on_the_seed_and_not_on_how_many_come_later(
    arrivals: Arrivals, seed: int, num_jobs: int
) -> None:
    """Equal seeds give equal times, in order; more jobs do not move the first ones (unless times are scaled
    to a rate)."""
    times_s = arrivals.times_s(JOBS[:num_jobs], seed)
    assert times_s == arrivals.times_s(JOBS[:num_jobs], seed)
    assert times_s == sorted(times_s)
    more_s = arrivals.times_s(JOBS[: num_jobs + 1], seed)
    if arrivals.kind is not ArrivalKind.RECORDED or arrivals.rate_per_s is None:
        assert more_s[:num_jobs] == times_s


def test_recorded_arrivals_start_at_zero_and_can_be_scaled() -> None:
    """The pattern is kept; the mean rate becomes the requested one."""
    some = [job("a", arrival_s=7.0), job("b", arrival_s=8.0), job("c", arrival_s=11.0)]
    assert Arrivals(kind=ArrivalKind.RECORDED).times_s(some, 0) == [0.0, 1.0, 4.0]
    assert Arrivals(kind=ArrivalKind.RECORDED, rate_per_s=4.0).times_s(some, 0) == [0.0, 0.125, 0.5]
    elsewhere = Arrivals(kind=ArrivalKind.RECORDED, recorded_s=(3.0, 3.5, 9.0, 10.0))
    assert elsewhere.times_s([job("a"), job("b")], 0) == [0.0, 0.5]


def test_sub_agents_do_not_arrive() -> None:
    """Only jobs that no other job starts have an arrival time."""
    some = [job("a"), job("a.x", parent_job="a"), job("b")]
    assert Arrivals().times_s(some, 0) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"kind": "poisson"}, "--arrivals poisson needs --rate"),
        ({"kind": "bursty"}, "--arrivals bursty needs --rate"),
        ({"kind": "poisson", "rate_per_s": 0.0}, "--rate must be above 0 jobs per second, got 0"),
        (
            {"kind": "poisson", "rate_per_s": 1.0, "cv": 2.0},
            "--burstiness has no effect with --arrivals poisson",
        ),
        ({"kind": "bursty", "rate_per_s": 1.0, "cv": 0.0}, "--burstiness must be from 0.01 to 100, got 0"),
        ({"kind": "bursty", "rate_per_s": 1.0, "cv": 1e200}, "must be from 0.01 to 100, got 1e[+]200"),
        ({"kind": "bursty", "rate_per_s": 1.0, "cv": float("nan")}, "must be from 0.01 to 100, got nan"),
        ({"kind": "at-once", "rate_per_s": 1.0}, "--rate has no effect with --arrivals at-once"),
        ({"kind": "closed"}, "--arrivals closed needs --concurrency"),
        ({"kind": "closed", "concurrency": 0}, "--concurrency must be at least 1, got 0"),
    ],
)
def test_arrivals_that_mean_nothing_are_refused(fields: dict[str, Any], complaint: str) -> None:
    """A parameter that a process does not use is refused."""
    with pytest.raises(UsageError, match=complaint):
        Arrivals(**fields | {"kind": ArrivalKind(fields["kind"])})


def test_loads_that_differ_are_called_differently() -> None:
    """Results are grouped by load, so the pattern must contain whatever rate and concurrency do not."""
    kinds = [
        Arrivals(kind=ArrivalKind.POISSON, rate_per_s=1.0),
        Arrivals(kind=ArrivalKind.BURSTY, rate_per_s=1.0, cv=2.0),
        Arrivals(kind=ArrivalKind.BURSTY, rate_per_s=1.0, cv=4.0),
        Arrivals(kind=ArrivalKind.RECORDED, rate_per_s=1.0),
    ]
    assert [one.pattern for one in kinds] == [
        None,
        "bursty (variation 2)",
        "bursty (variation 4)",
        "recorded",
    ]


def test_jobs_without_a_recorded_arrival_cannot_arrive_as_recorded() -> None:
    """The error names the job; for a recording that is too short it has the length."""
    with pytest.raises(WorkloadError, match="Job b has no recorded arrival"):
        Arrivals(kind=ArrivalKind.RECORDED).times_s([job("a", arrival_s=1.0), job("b")], 0)
    with pytest.raises(WorkloadError, match="2 jobs, but only 1 recorded arrivals"):
        Arrivals(kind=ArrivalKind.RECORDED, recorded_s=(1.0,)).times_s([job("a"), job("b")], 0)


def test_every_process_says_what_it_assumes() -> None:
    """Each process has one line for the report."""
    assert [arrivals.describe() for arrivals in LEGAL] == [
        "job arrivals: ASSUMED, all at the start",
        "job arrivals: ASSUMED, Poisson at 0.2 per s",
        "job arrivals: ASSUMED, bursty at 0.2 per s (gamma, coefficient of variation 4)",
        "job arrivals: measured",
        "job arrivals: measured, scaled to 3 per s",
        "job arrivals: ASSUMED, closed loop of 8 jobs",
    ]
    assert ARRIVALS == ("at-once", "poisson", "bursty", "recorded", "closed")

"""Each tenant's durations are learned separately; others contribute as far as that was seen to help."""

from __future__ import annotations

import random

from estimator.durations import DurationEstimator
from estimator.survival import SurvivalCurve
from estimator.tenants import MAX_TENANTS, Learned, Tenants
from estimator.tool_key import tool_key

READ = tool_key("read_file", "{}")
TESTS = tool_key("bash", '{"command": "pytest"}')


def seen(tenants: Tenants, tenant: str, duration_s: float, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        tenants.observe(tenant, READ, duration_s, False, None, now)


def median_s(tenants: Tenants, tenant: str) -> float | None:
    return tenants.survival(tenant, READ, None).known_median_s


def same(one: SurvivalCurve, other: SurvivalCurve) -> bool:
    return (one.probabilities, one.num_observations) == (other.probabilities, other.num_observations)


def test_one_tenant_alone_is_answered_as_if_there_were_no_tenants() -> None:
    """The results are identical, with or without a name, with jobs and censored calls."""
    for tenant in ("", "alice"):
        tenants, plain = Tenants(), DurationEstimator()
        for number in range(60):
            key, job = (READ, TESTS)[number % 2], f"job {number % 5}"
            tenants.observe(tenant, key, 1.0 + number % 7, number % 9 == 0, job, float(number))
            plain.observe(key, 1.0 + number % 7, number % 9 == 0, job=job, now=float(number))
            assert same(tenants.survival(tenant, key, job), plain.survival(key, job))


def test_another_tenants_calls_do_not_move_what_is_known() -> None:
    """Sixty of bob's calls of 33 s and three of alice's of 2 s do not mix, whichever tenant came first."""
    for first, second in (("alice", "bob"), ("bob", "alice")):
        tenants = Tenants()
        for tenant in (first, second):
            seen(tenants, tenant, *((2.0, 3) if tenant == "alice" else (33.0, 60)))
        for name, expected_s in (("alice", 2.0), ("bob", 33.0)):
            median = median_s(tenants, name)
            assert median is not None
            assert 0.8 * expected_s < median < 1.2 * expected_s
        assert tenants.survival("alice", READ, None).cdf(3.0) == 1.0


def test_a_stranger_is_told_nothing_of_one_other_tenant() -> None:
    """A new tenant gets neither durations nor turn outcomes of the only other tenant."""
    tenants = Tenants()
    seen(tenants, "bob", 33.0, 60)
    tenants.observe_last("bob", [READ])
    fresh = Tenants().turns_of("").last_turn_probability([READ])
    assert tenants.survival("alice", READ, None).num_observations == 0
    assert tenants.turns_of("alice").last_turn_probability([READ]) == fresh


def test_where_tenants_are_alike_a_new_one_is_lent_what_they_know() -> None:
    """A new tenant gets the others' common durations, since tenants repeated them; the weight is bounded by
    the number of others."""
    tenants, draw = Tenants(), random.Random(1)
    for _ in range(40):
        for tenant in ("a", "b", "c"):
            seen(tenants, tenant, draw.lognormvariate(1.0, 0.7), 1)
    curve = tenants.survival("new", READ, None)
    assert curve.known_median_s is not None
    assert 1.5 < curve.known_median_s < 5.0
    assert curve.num_observations <= 2 * 4.0


def test_where_tenants_differ_a_flood_of_one_lends_nothing() -> None:
    """Each tenant repeats only itself, so others' durations never helped, and a new tenant gets none."""
    tenants = Tenants()
    for tenant, duration_s, times in (("a", 0.1, 10), ("b", 5.0, 10), ("c", 60.0, 500), ("a", 0.1, 30)):
        seen(tenants, tenant, duration_s, times)
    assert tenants.survival("new", READ, None).num_observations == 0
    assert tenants.survival("b", READ, None).cdf(6.0) == 1.0


def test_tenants_are_bounded() -> None:
    """Beyond the bound the tenants not seen for longest are forgotten."""
    tenants = Tenants(Learned())
    for number in range(3 * MAX_TENANTS):
        seen(tenants, f"t{number}", 1.0, 1)
    assert len(tenants.own) == MAX_TENANTS
    assert f"t{3 * MAX_TENANTS - 1}" in tenants.own

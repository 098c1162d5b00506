"""How much a client's estimates are trusted, and that this is learned."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.expectation import ExpectationMemory
from estimator.survival import NOTHING_KNOWN, SurvivalCurve

SECONDS = st.floats(0, 1e5)
KNOWN = SurvivalCurve((0.0, 90.0, 110.0), (0.0, 0.0, 1.0), 50.0)


def test_at_first_what_is_said_is_believed_more_or_less() -> None:
    """Most of the probability is near the estimate, some of it follows experience."""
    memory = ExpectationMemory()
    alone = memory.remaining(("me", "ls"), 10.0, None)
    assert alone.quantile(0.5) == pytest.approx(10, rel=0.2)
    assert alone.cdf(20) - alone.cdf(5) > 0.9
    beside = memory.remaining(("me", "ls"), 10.0, KNOWN)
    assert 0.6 < beside.cdf(50) < 0.9
    assert memory.remaining(("me", "ls"), 10.0, NOTHING_KNOWN).cdf(50) == pytest.approx(1)


def test_a_bias_is_learned() -> None:
    """A client that needs three times its estimate is corrected, and no other client is."""
    memory = ExpectationMemory()
    for _ in range(30):
        memory.observe(("slow", "make"), 10.0, 30.0, None)
        memory.observe(("exact", "make"), 10.0, 10.0, None)
    assert memory.remaining(("slow", "make"), 20.0, None).quantile(0.5) == pytest.approx(60, rel=0.25)
    assert memory.remaining(("exact", "make"), 20.0, None).quantile(0.5) == pytest.approx(20, rel=0.25)


def test_who_foretells_worse_than_experience_counts_less() -> None:
    """Estimates worse than experience lose weight, better ones gain it."""
    memory = ExpectationMemory()
    before = memory.weight(("noise", "make"))
    for number in range(40):
        memory.observe(("noise", "make"), 10.0 ** (number % 4), 100.0, 100.0)
        memory.observe(("oracle", "make"), 100.0, 100.0, 10.0 ** (number % 4))
    assert memory.weight(("noise", "make")) < before / 2
    assert memory.weight(("oracle", "make")) > before


@given(
    said=st.lists(st.tuples(st.sampled_from("abc"), SECONDS, SECONDS, st.none() | SECONDS), max_size=20),
    remaining_s=SECONDS,
    elapsed_s=SECONDS,
)
def test_whatever_is_said_a_curve_comes_out(
    said: list[tuple[str, float, float, float | None]], remaining_s: float, elapsed_s: float
) -> None:
    """For any estimate the curve increases, stays within [0, 1], and remains valid as time passes."""
    memory = ExpectationMemory()
    for client, said_s, actual_s, known_s in said:
        memory.observe((client, "t"), said_s, actual_s, known_s)
    for known in (None, KNOWN):
        curve = memory.remaining(("a", "t"), remaining_s, known)
        for each in (curve, curve.after(elapsed_s)):
            assert list(each.edges_s) == sorted(each.edges_s)
            assert list(each.probabilities) == sorted(each.probabilities)
            assert 0 <= each.probabilities[0] <= each.probabilities[-1] <= 1 + 1e-9
            assert not math.isnan(each.median_remaining(0.0))


@given(st.floats(0, 200))
def test_a_curve_after_some_time_is_what_is_left_of_it(elapsed_s: float) -> None:
    """The remaining curve is P(D <= e + t | D > e), for every t."""
    curve = SurvivalCurve((0.0, 10.0, 50.0, 150.0), (0.0, 0.4, 0.6, 0.9), 5.0)
    after = curve.after(elapsed_s)
    gone = curve.cdf(elapsed_s)
    for t_s in (0.0, 1.0, 30.0, 149.0, 500.0):
        assert after.cdf(t_s) == pytest.approx((curve.cdf(elapsed_s + t_s) - gone) / (1 - gone))

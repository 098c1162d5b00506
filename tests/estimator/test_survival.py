"""A survival curve answers the rules' queries, and says so if it does not know."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.survival import NOTHING_KNOWN, SurvivalCurve, max_of

UNIFORM = SurvivalCurve((0.0, 10.0), (0.0, 1.0), 5.0)
HALF_KNOWN = SurvivalCurve((0.0, 2.0, 4.0), (0.0, 0.5, 0.5), 3.0)


@st.composite
def curves(draw: st.DrawFn) -> SurvivalCurve:
    steps = draw(st.lists(st.tuples(st.floats(0.01, 50), st.floats(0, 1)), min_size=1, max_size=8))
    tail = draw(st.sampled_from([0.0, 0.5]))
    total = sum(mass for _, mass in steps) + tail
    edges, probabilities = [0.0], [0.0]
    for width, mass in steps:
        edges.append(edges[-1] + width)
        probabilities.append(min(1.0, probabilities[-1] + (mass / total if total else 0.0)))
    return SurvivalCurve(tuple(edges), tuple(probabilities), draw(st.floats(0.5, 9)))


def test_uniform() -> None:
    """For a call that ends uniformly between 0 and 10 s all answers are those of the uniform distribution."""
    assert UNIFORM.cdf(2.5) == pytest.approx(0.25)
    assert (UNIFORM.cdf(-1), UNIFORM.cdf(11)) == (0.0, 1.0)
    assert UNIFORM.quantile(0.9) == pytest.approx(9)
    assert UNIFORM.median_remaining(0) == pytest.approx(5)
    assert UNIFORM.median_remaining(6) == pytest.approx(2)
    assert UNIFORM.expected_min(4) == pytest.approx(4 - 16 / 20)
    assert UNIFORM.expected_min(math.inf) == UNIFORM.expected_min(10) == pytest.approx(5)
    assert UNIFORM.support == (10.0,)


def test_unknown_tail() -> None:
    """If half of the calls were never seen to end, later quantiles and the mean are infinite."""
    assert HALF_KNOWN.quantile(0.5) == 2
    assert HALF_KNOWN.quantile(0.51) == math.inf
    assert HALF_KNOWN.median_remaining(1) == math.inf
    assert HALF_KNOWN.expected_min(6) == pytest.approx(2 * 0.75 + 4 * 0.5)
    assert HALF_KNOWN.expected_min(math.inf) == math.inf
    assert HALF_KNOWN.support == (2.0,)
    assert UNIFORM.median_remaining(10) == math.inf


def test_nothing_known() -> None:
    """The curve of no observations predicts nothing and counts none."""
    assert NOTHING_KNOWN.num_observations == 0
    assert NOTHING_KNOWN.cdf(1e9) == 0
    assert NOTHING_KNOWN.quantile(0.1) == NOTHING_KNOWN.median_remaining(5) == math.inf
    assert NOTHING_KNOWN.expected_min(7) == 7
    assert NOTHING_KNOWN.support == ()


@given(curve=curves(), a=st.floats(0, 500), b=st.floats(0, 500), q=st.floats(0.001, 1))
def test_laws(curve: SurvivalCurve, a: float, b: float, q: float) -> None:
    """Probabilities and hold times grow with time; the quantile inverts the probability."""
    low, high = min(a, b), max(a, b)
    assert 0 <= curve.cdf(low) <= curve.cdf(high) <= 1
    assert curve.expected_min(low) <= curve.expected_min(high) + 1e-9
    assert curve.expected_min(high) <= high + 1e-9
    if math.isfinite(t := curve.quantile(q)):
        assert curve.cdf(t) == pytest.approx(q, abs=1e-9)
        assert curve.cdf(t * (1 - 1e-6)) <= q
    assert curve.median_remaining(low) >= 0
    assert list(curve.support) == sorted(set(curve.support))


@given(curve=curves(), benefit=st.floats(0.1, 100), price=st.floats(0, 10), t=st.floats(0, 400))
def test_support_has_the_best_ttl(curve: SurvivalCurve, benefit: float, price: float, t: float) -> None:
    """No time is worth more than the best of 0 and the support: P(D <= t)·benefit - price·E[min(D, t)]."""

    def worth(ttl_s: float) -> float:
        return curve.cdf(ttl_s) * benefit - price * curve.expected_min(ttl_s)

    assert worth(t) <= max(worth(ttl_s) for ttl_s in (0.0, *curve.support)) + 1e-6


@given(parts=st.lists(curves(), min_size=1, max_size=4), t=st.floats(0, 400))
def test_max_of(parts: list[SurvivalCurve], t: float) -> None:
    """The last of parallel calls ends when all have, and counts the fewest observations of any."""
    edges = sorted({edge for curve in parts for edge in curve.edges_s})
    last = max_of(parts)
    at = max(edge for edge in edges if edge <= t)
    assert last.cdf(at) == pytest.approx(math.prod(curve.cdf(at) for curve in parts))
    assert all(last.cdf(t) <= curve.cdf(t) + 1e-9 for curve in parts)
    assert last.num_observations == min(curve.num_observations for curve in parts)


@given(curves(), st.lists(st.floats(0.1, 10), min_size=2, max_size=2))
def test_a_moved_curve_is_a_curve(curve: SurvivalCurve, factors: list[float]) -> None:
    """For any factors times and probabilities increase. A level's time moves at least by its factor, unless
    the previous level's time is later."""
    moved = curve.moved((0.25, 0.75), factors, 0.001)
    assert list(moved.edges_s) == sorted(set(moved.edges_s))
    assert list(moved.probabilities) == sorted(moved.probabilities)
    assert moved.probabilities[-1] == curve.probabilities[-1]
    low_s, moved_s = curve.quantile(0.25), moved.quantile(0.25)
    if math.isfinite(low_s):
        assert moved_s >= (low_s + 0.001) * factors[0] - 0.001 - 1e-9
    same = curve.moved((0.25, 0.75), (1.0, 1.0), 0.001)
    assert same.quantile(0.5) == pytest.approx(curve.quantile(0.5), abs=1e-9)

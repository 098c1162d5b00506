"""Logarithms and powers in plain arithmetic equal the exact ones, up to a few units in the last place."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.plain_math import dot, exp, geometric, halved, lgamma, log, log1p


@given(st.floats(1e-300, 1e300))
def test_the_logarithm(x: float) -> None:
    assert abs(log(x) - math.log(x)) <= 4 * math.ulp(math.log(x)) + 1e-300
    assert abs(log1p(x) - math.log1p(x)) <= 4 * math.ulp(math.log1p(x))


@given(st.floats(-745, 709))
def test_the_exponential(x: float) -> None:
    assert abs(exp(x) - math.exp(x)) <= 4 * math.ulp(math.exp(x))


@given(st.floats(1e-3, 1e6))
def test_the_gamma_functions_logarithm(x: float) -> None:
    assert lgamma(x) == pytest.approx(math.lgamma(x), rel=1e-13, abs=1e-13)


def test_the_ends_of_the_range() -> None:
    """Nothing overflows or becomes negative."""
    assert exp(-1e9) == 0.0
    assert math.isfinite(exp(1e9))
    assert exp(0.0) == 1.0
    assert log(1.0) == log1p(0.0) == 0.0
    assert log1p(1e-20) == 1e-20
    assert lgamma(1.0) == pytest.approx(0.0, abs=1e-14)


def test_halving() -> None:
    assert [halved(times) for times in (0.0, 1.0, 10.0)] == pytest.approx([1.0, 0.5, 2**-10], rel=1e-15)


def test_a_geometric_sequence_has_its_ends_as_given() -> None:
    steps = geometric(0.001, 21600.0, 120)
    assert (steps[0], steps[-1], len(steps)) == (0.001, 21600.0, 120)
    assert sorted(set(steps)) == steps
    assert steps[40] / steps[39] == pytest.approx(steps[100] / steps[99], rel=1e-12)


def test_a_sum_of_products_is_rounded_once() -> None:
    assert dot([1e16, 1.0, -1e16], [1.0, 1.0, 1.0]) == 1.0

"""The cost of a prefill is learned from steps, and is plausible before and between them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.cost import PrefillCost


def step_s(new: int, context: int = 0) -> float:
    """A machine with 5 ms a step, 50 us a token and quadratic attention."""
    return 0.005 + 5e-5 * new + 2e-9 * new * (context + new / 2)


def test_before_data() -> None:
    """Without data the cost is the default rate; for no tokens it is zero."""
    assert PrefillCost(default_tokens_per_s=1000).seconds(2000) == 2.0
    assert PrefillCost().seconds(0) == 0


def test_first_steps() -> None:
    """One size of step gives a rate, two give a rate and a constant: neither guesses a curve."""
    cost = PrefillCost()
    cost.observe(100, 0, 0.1)
    assert cost.seconds(1000) == pytest.approx(1.0)
    cost.observe(1000, 0, 0.55)
    assert cost.seconds(2000) == pytest.approx(0.05 + 2000 * 0.0005)


def test_recovers_the_machine() -> None:
    """The cost of a long prefill is learned from noisy chunks, most of them small and some stalled."""
    rng = np.random.default_rng(3)
    cost = PrefillCost()
    for _ in range(600):
        new = int(rng.choice([16, 64, 256, 1024, 2048], p=[0.6, 0.2, 0.1, 0.05, 0.05]))
        context = int(rng.integers(0, 30_000))
        stall = 10.0 if rng.random() < 0.01 else 1.0
        cost.observe(new, context, step_s(new, context) * rng.lognormal(0, 0.05) * stall)
    for num_tokens in (1000, 8000, 32_000):
        assert cost.seconds(num_tokens) == pytest.approx(step_s(num_tokens), rel=0.3)


def test_follows_a_slower_machine() -> None:
    """When steps become slower the cost follows."""
    cost = PrefillCost()
    for factor, rounds in ((1.0, 50), (3.0, 50)):
        for _ in range(rounds):
            for new in (64, 512, 4096):
                cost.observe(new, 0, factor * step_s(new))
    assert cost.seconds(4096) == pytest.approx(3 * step_s(4096), rel=0.05)


STEPS = st.lists(
    st.tuples(
        st.integers(-1, 200_000),
        st.integers(-1, 200_000),
        st.floats(1e-7, 1e4) | st.sampled_from([0.0, -1.0, math.inf, math.nan]),
    ),
    max_size=30,
)


@given(steps=STEPS, few=st.integers(0, 10**6), more=st.integers(0, 10**6))
def test_always_a_cost(steps: list[tuple[int, int, float]], few: int, more: int) -> None:
    """For any reported steps the cost is finite, and more tokens never cost less."""
    cost = PrefillCost()
    for new, before, seconds in steps:
        cost.observe(new, before, seconds)
    low = cost.seconds(few)
    assert 0 <= low < math.inf
    assert low <= cost.seconds(few + more) * (1 + 1e-9)


def test_memory_is_bounded() -> None:
    """However many steps run, one mean per size is kept."""
    cost = PrefillCost()
    for number in range(1, 3000):
        cost.observe(number, number * 7 % 1000, 0.001 * number)
    assert cost.num_observations == 2999
    assert len(cost._means) <= 12 * 11

"""The price rule, checked against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum.learning.program_stats import ReloadCost
from continuum.retention.ttl import PriceRule, TtlInputs
from estimator.survival import NOTHING_KNOWN, SurvivalCurve

RULE = PriceRule(answer_ttl_s=2.0, pool_price=1.0, cheap_reload_share=0.02)
HALF_QUICK = SurvivalCurve((0.0, 1.0, 99.0, 100.0), (0.0, 0.5, 0.5, 1.0), 50)
"""Half of the calls return within a second, the other half after about a hundred."""
INPUTS = TtlInputs(
    curve=HALF_QUICK,
    global_curve=HALF_QUICK,
    num_blocks=100,
    prefill_s=4.0,
    queue_delay_s=0.0,
    memoryfulness=1.0,
    called_tools=True,
    pool_share=0.1,
)


def test_it_waits_for_the_quick_half_and_lets_the_slow_half_go() -> None:
    """1 s gains 0.5 x 4 - 0.1 x 0.75 = 1.9 s; 100 s gain 4 - 0.1 x 50.0 = -1 s."""
    assert RULE.choose_ttl(INPUTS).ttl_s == 1.0


def test_cheap_memory_or_dear_computing_waits_for_all() -> None:
    """100 s at a hundredth of the pool gain 4 - 0.01 x 50 = 3.5 s; it then holds until that is spent."""
    decision = RULE.choose_ttl(replace(INPUTS, pool_share=0.01))
    assert decision.ttl_s == pytest.approx(100 + 4 / 0.01)
    assert RULE.choose_ttl(replace(INPUTS, prefill_s=40.0)).ttl_s == pytest.approx(100 + 40 / 0.1)


def test_what_is_held_in_cheaper_memory_is_held_for_longer() -> None:
    """At half the price the quick half still wins (0.5 x 4 - 0.05 x 0.75 s against 4 - 0.05 x 50 s for all);
    at a tenth all do: 4 - 0.01 x 50 s against 0.5 x 4 - 0.01 x 0.75 s."""
    assert replace(RULE, pool_price=0.5).choose_ttl(INPUTS).ttl_s == 1.0
    assert replace(RULE, pool_price=0.1).choose_ttl(INPUTS).ttl_s == pytest.approx(100 + 4 / 0.01)
    unknown = replace(INPUTS, curve=NOTHING_KNOWN)
    assert replace(RULE, pool_price=0.5).choose_ttl(unknown).ttl_s == pytest.approx(80)


def test_a_cheap_copy_is_let_go_at_once() -> None:
    """A load takes less than a fiftieth of the 4 s of computing, so it is released; later signals change
    nothing."""
    decision = RULE.choose_ttl(replace(INPUTS, pool_share=1e-6, reload_s=0.07))
    assert (decision.ttl_s, decision.is_final) == (0.0, True)
    assert not RULE.choose_ttl(replace(INPUTS, pool_share=1e-6, reload_s=0.09)).is_final


def test_a_copy_in_host_memory_makes_holding_worth_less() -> None:
    """With a copy only the reload is saved: 0.5 x 0.1 - 0.1 x 0.75 < 0, so nothing is pinned."""
    assert RULE.choose_ttl(replace(INPUTS, reload_s=0.1)).ttl_s == 0.0
    assert RULE.choose_ttl(replace(INPUTS, reload_s=1.0)).ttl_s == 1.0


def test_nothing_learned_is_held_until_holding_has_cost_its_worth() -> None:
    """4 s of computing at a tenth of the pool pay for 40 s. An answer is probably the last turn: 2 s."""
    unknown = replace(INPUTS, curve=NOTHING_KNOWN)
    assert RULE.choose_ttl(unknown).ttl_s == pytest.approx(40)
    assert RULE.choose_ttl(replace(unknown, called_tools=False)).ttl_s == 2.0


@given(
    gaps=st.lists(st.floats(0.01, 500), min_size=1, max_size=12, unique=True),
    prefill_s=st.floats(0.01, 30),
    pool_share=st.floats(0.001, 1),
)
def test_no_other_time_is_worth_more(gaps: list[float], prefill_s: float, pool_share: float) -> None:
    """Of all times at which a call may return, the chosen one gains the most."""
    edges = (0.0, *sorted(gaps))
    curve = SurvivalCurve(edges, [index / len(gaps) for index in range(len(edges))], len(gaps))
    inputs = replace(INPUTS, curve=curve, prefill_s=prefill_s, pool_share=pool_share)

    def worth_s(until_s: float) -> float:
        return curve.cdf(until_s) * prefill_s - pool_share * curve.expected_min(until_s)

    chosen_s = min(RULE.choose_ttl(inputs).ttl_s, edges[-1])
    assert worth_s(chosen_s) >= max(worth_s(t) for t in edges) - 1e-9


@given(
    gaps=st.lists(st.floats(0.01, 500), min_size=1, max_size=12, unique=True),
    prefill_s=st.floats(0.01, 30),
    pool_share=st.floats(0.001, 1),
    elapsed=st.floats(0, 0.99),
)
def test_asked_again_while_the_call_runs_it_says_the_same(
    gaps: list[float], prefill_s: float, pool_share: float, elapsed: float
) -> None:
    """Choosing again while the call runs gives the same deadline, so that a pin need not be reviewed before,
    unless something is learned. ``elapsed`` is a share of the time until the deadline."""
    edges = (0.0, *sorted(gaps))
    curve = SurvivalCurve(edges, [index / len(gaps) for index in range(len(edges))], len(gaps))
    inputs = replace(INPUTS, curve=curve, prefill_s=prefill_s, pool_share=pool_share)

    def worth_s(until_s: float) -> float:
        return curve.cdf(until_s) * prefill_s - pool_share * curve.expected_min(until_s)

    chosen_s = min(RULE.choose_ttl(inputs).ttl_s, edges[-1])
    elapsed_s = elapsed * chosen_s
    again_s = elapsed_s + RULE.choose_ttl(replace(inputs, curve=curve.after(elapsed_s))).ttl_s
    assert worth_s(min(again_s, edges[-1])) == pytest.approx(worth_s(chosen_s), abs=1e-6)


def test_what_is_probably_the_last_turn_is_worth_less() -> None:
    """With one return in eight the quick half gains 0.5 x 0.5 - 0.1 x 0.75 s, with one in forty nothing."""
    assert RULE.choose_ttl(replace(INPUTS, last_probability=7 / 8)).ttl_s == 1.0
    assert RULE.choose_ttl(replace(INPUTS, last_probability=39 / 40)).ttl_s == 0.0


def test_the_cost_of_a_reload_is_that_of_tokens_not_of_waiting_for_a_step() -> None:
    """A block that waits 60 ms for a step's end, between loads of thousands of tokens, does not make a large
    load expensive: 100 ms and 60 ms for 10,016 tokens in all, as a moving mean."""
    cost = ReloadCost(smoothing=0.1)
    assert cost.seconds(1000) is None
    for _ in range(200):
        cost.observe(10_000, 0.1)
        cost.observe(16, 0.06)
    assert cost.seconds(10_000) == pytest.approx(0.16, rel=0.05)

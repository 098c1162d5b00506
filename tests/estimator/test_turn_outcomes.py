"""What follows a turn is learned by how it ended: whether another turn comes, and how much its prompt
grows."""

from __future__ import annotations

import pytest

from estimator.tool_key import tool_key
from estimator.turn_outcomes import MAX_KEYS, TurnOutcomes

PYTEST = tool_key("bash", "pytest")
LS = tool_key("bash", "ls")


def test_nothing_learned() -> None:
    """Without data, a call is expected to be continued, an answer may be the end, and growth is unknown."""
    outcomes = TurnOutcomes()
    assert outcomes.last_turn_probability([PYTEST]) < 0.1
    assert outcomes.last_turn_probability([]) == 0.5
    assert outcomes.prompt_growth([PYTEST]) is None


def test_answers_and_calls_are_told_apart() -> None:
    """However many calls were followed by a turn, an answer is predicted from answers only."""
    outcomes = TurnOutcomes()
    for _ in range(500):
        outcomes.observe_next([PYTEST], 100)
    assert outcomes.last_turn_probability([]) == 0.5
    for _ in range(20):
        outcomes.observe_last([])
    assert outcomes.last_turn_probability([]) > 0.85
    assert outcomes.last_turn_probability([PYTEST]) < 0.01
    for _ in range(40):
        outcomes.observe_next([], 10)
    assert outcomes.last_turn_probability([]) == pytest.approx(22 / 64, abs=0.03)


def test_growth_is_that_of_the_kind_of_call() -> None:
    """Each kind of call has its own mean, a rare one uses its parents', an unknown one the overall mean; a
    shorter prompt counts as no growth."""
    outcomes = TurnOutcomes()
    for _ in range(100):
        outcomes.observe_next([PYTEST], 2000)
        outcomes.observe_next([LS], 50)
        outcomes.observe_next([], -7)
    assert outcomes.prompt_growth([PYTEST]) == pytest.approx(2000, rel=0.05)
    assert outcomes.prompt_growth([LS, PYTEST]) == pytest.approx(50, abs=60)
    assert outcomes.prompt_growth([tool_key("bash", "make")]) == pytest.approx(1025, rel=0.05)
    assert outcomes.prompt_growth([]) == pytest.approx(0, abs=40)
    assert outcomes.prompt_growth(None) == pytest.approx(2050 / 3, rel=0.05)


def test_memory_is_bounded() -> None:
    """Beyond the bound the kinds unseen for longest are forgotten, never a parent before its child."""
    outcomes = TurnOutcomes()
    for number in range(MAX_KEYS + 50):
        outcomes.observe_next([tool_key(f"tool{number}")], 1)
    assert len(outcomes.tallies) == MAX_KEYS
    assert all(parts[:-1] in outcomes.tallies for parts in outcomes.tallies)

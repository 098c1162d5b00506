"""How many drafts are verified: those that gain more than they cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from engine.core.drafts.lengths import MIN_GAIN, AcceptanceRecords, StepCosts, best_lengths

FREE = StepCosts([(1, 1.0), (1024, 1.0)])
"""Rows cost nothing: a step takes only the time to read the weights."""
LINEAR = StepCosts([(1, 1.0), (2, 2.0)])
"""Each row costs as much as the first."""
MANY = 10_000
CHANCES = st.lists(st.floats(0.1, 1.0), max_size=16).map(lambda chances: sorted(chances, reverse=True))
COSTS = st.lists(st.floats(0.001, 10.0), min_size=2, max_size=6).map(
    lambda seconds: StepCosts([(1 << i, cost) for i, cost in enumerate(seconds)])
)


def _one(chances: list[float], num_rows: int, costs: StepCosts | None, max_rows: int = MANY) -> int:
    """The number of drafts for the only request that has any."""
    return best_lengths([chances], num_rows, costs, max_rows)[0]


def test_costs_are_lines_between_what_was_measured() -> None:
    """Costs are interpolated and extrapolated linearly; a lower cost for more rows is treated as noise."""
    costs = StepCosts([(1, 1.0), (5, 2.0), (8, 1.5), (16, 10.0)], [(1, 0.5), (2, 1.0)])
    assert [costs.drafted(rows) for rows in (1, 3, 5, 8, 12, 24)] == [1.0, 1.5, 2.0, 2.0, 6.0, 18.0]
    assert [costs.plain(rows) for rows in (1, 2, 4)] == [0.5, 1.0, 2.0]


@given(CHANCES)
def test_all_likely_drafts_are_taken_where_rows_are_free(chances: list[float]) -> None:
    """All likely drafts are taken if rows are free, or if no costs were measured."""
    assert _one(chances, 1, FREE) == len(chances)
    assert _one(chances, 1, None) == len(chances)


def test_unlikely_drafts_never_are() -> None:
    """Unlikely drafts are never taken, however cheap a row is."""
    assert _one([0.9, 0.5, 0.09], 1, FREE) == 2


@given(st.lists(CHANCES, max_size=4), st.integers(4, 64))
def test_none_are_taken_where_each_row_costs_a_step(chances: list[list[float]], num_rows: int) -> None:
    """If each row costs a step, as under load, no drafts are taken."""
    assert not any(best_lengths(chances, num_rows, LINEAR, MANY))
    assert not LINEAR.may_pay(num_rows, 16 * num_rows)


@given(st.lists(CHANCES, min_size=1, max_size=3), st.integers(3, 64), COSTS)
def test_no_other_lengths_bring_more(chances: list[list[float]], num_rows: int, costs: StepCosts) -> None:
    """No other lengths give more tokens per second than the chosen ones."""

    def tokens_per_s(lengths: Sequence[int]) -> float:
        brought = sum(sum(each[:length]) for each, length in zip(chances, lengths, strict=True))
        return (num_rows + brought) / costs.drafted(num_rows + sum(lengths))

    chosen = best_lengths(chances, num_rows, costs, MANY)
    rate = tokens_per_s(chosen) if any(chosen) else MIN_GAIN * num_rows / costs.plain(num_rows)
    others = product(*(range(len(each) + 1) for each in chances))
    assert all(rate >= tokens_per_s(lengths) * (1 - 1e-9) for lengths in others if any(lengths))
    assert not any(chosen) or rate > MIN_GAIN * num_rows / costs.plain(num_rows) * (1 - 1e-9)


@given(st.integers(1, 64), st.integers(1, 64), COSTS)
def test_nobody_is_asked_where_even_sure_drafts_would_not_pay(
    num_rows: int, most: int, costs: StepCosts
) -> None:
    """Drafts are proposed exactly if some number of sure drafts would pay."""
    sure = best_lengths([[1.0] * most], num_rows, costs, MANY)[0]
    assert costs.may_pay(num_rows, most) == (sure > 0)


def test_the_likeliest_drafts_of_all_requests_go_first() -> None:
    """One request's second draft goes before another's first, if it is likelier."""
    assert best_lengths([[0.9, 0.8, 0.7], [0.5, 0.4], []], 3, FREE, max_rows=6) == [3, 0, 0]
    assert best_lengths([[0.9, 0.3], [0.5, 0.4], []], 3, FREE, max_rows=6) == [1, 2, 0]


def test_a_step_that_jumps_in_cost_is_taken_whole_or_not_at_all() -> None:
    """If the first draft doubles a step's cost and more hardly add to it, all are taken or none."""
    costs = StepCosts([(1, 2.0), (64, 2.1)], [(1, 1.0), (64, 1.1)])
    assert _one([0.9], 1, costs) == 0
    assert _one([0.9, 0.8, 0.7, 0.6], 1, costs) == 4
    assert best_lengths([[0.9], [0.9], [0.9], [0.9]], 4, costs, MANY) == [0, 0, 0, 0]
    assert best_lengths([[0.9, 0.8]] * 4, 4, costs, MANY) == [2, 2, 2, 2]


def test_a_step_has_no_more_rows_than_it_may() -> None:
    """The token budget of a step bounds the drafts."""
    assert _one([0.9] * 8, 4, FREE, max_rows=7) == 3
    assert _one([0.9] * 8, 9, FREE, max_rows=7) == 0


def test_a_request_is_judged_by_its_own_acceptance() -> None:
    """Rejected drafts lower a request's chances, steps without drafts restore them; other requests are
    unaffected."""
    records = AcceptanceRecords()
    chances = [0.8, 0.6]
    for _ in range(20):
        records.proposed("bad", chances)
        records.observe("bad", 2, 0)
    low = records.corrected("bad", chances)
    assert low[0] < 0.2
    assert records.corrected("good", chances) == chances
    for _ in range(300):
        records.proposed("bad", ())
    assert records.corrected("bad", chances)[0] > 0.75
    records.ended("bad")
    assert records.corrected("bad", chances) == chances


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), max_size=60))
def test_chances_stay_chances(steps: list[tuple[int, int]]) -> None:
    """Chances stay between 0 and 1 for any acceptance."""
    records = AcceptanceRecords()
    for num_drafts, num_accepted in steps:
        chances = records.corrected("r", [0.9, 0.8, 0.5, 0.2])
        assert all(0 <= chance <= 1 for chance in chances)
        records.proposed("r", chances[:num_drafts])
        records.observe("r", num_drafts, min(num_drafts, num_accepted))

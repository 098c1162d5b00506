"""How much groups share: everything if they are alike, little if they differ."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estimator.rate_belief import RateGroup, dispersion_of, exposures_per_end


def _group(durations: list[float]) -> RateGroup:
    """A group whose durations have all ended."""
    total, squares = sum(durations), sum(duration**2 for duration in durations)
    return RateGroup(total, len(durations), total, squares)


def _drawn(rng: random.Random, draw: Callable[[], float], count: int) -> list[float]:
    return [draw() for _ in range(count)]


def test_nothing_is_expected_before_anything_ended() -> None:
    """Without an end, nothing is expected, for any exposure."""
    assert exposures_per_end([]) is None
    assert exposures_per_end([RateGroup(exposure=100.0), RateGroup(exposure=3.0)]) is None


def test_groups_that_differ_are_told_apart() -> None:
    """Thirty ends of 10 s and thirty of 100 s: the estimates are near the observations, in order."""
    short, long = exposures_per_end([_group([10.0] * 30), _group([100.0] * 30)]) or (0, 0)
    assert short == pytest.approx(10, rel=0.2)
    assert long == pytest.approx(100, rel=0.1)


def test_a_group_that_runs_and_runs_is_believed_to_be_longer_before_any_of_it_ended() -> None:
    """A group that has run for long without an end is estimated above one with twenty ends."""
    ended, running = exposures_per_end([_group([10.0] * 20), RateGroup(exposure=400.0)]) or (0, 0)
    assert running > 3 * ended


def test_one_group_is_what_all_are() -> None:
    """A single group equals the mean, to the last bit, so that rounding orders nothing."""
    group = _group([1.1, 2.3, 7.7])
    assert exposures_per_end([group]) == [group.exposure / group.num_ends]


@pytest.mark.parametrize("num_groups", [2, 3, 10])
@pytest.mark.parametrize("sigma", [0.4, 1.0])
def test_groups_that_are_alike_stay_so(num_groups: int, sigma: float) -> None:
    """With forty log-normal durations each, in thirty repeats, the most deviant group is estimated a tenth
    off the mean on average, though its observations are farther off."""
    rng = random.Random(5)
    shown, believed = [], []
    for _ in range(30):
        groups = [_group(_drawn(rng, lambda: rng.lognormvariate(0, sigma), 40)) for _ in range(num_groups)]
        usual = sum(group.exposure for group in groups) / sum(group.num_ends for group in groups)
        expected = exposures_per_end(groups) or []
        shown.append(max(abs(group.exposure / group.num_ends / usual - 1) for group in groups))
        believed.append(max(abs(one / usual - 1) for one in expected))
    assert sum(believed) / 30 < 0.1
    assert sum(believed) < 0.6 * sum(shown)


def test_what_scatters_within_a_group_says_less() -> None:
    """With the same sums, groups that scatter widely are separated less than groups that do not."""
    even = [_group([10.0] * 10), _group([20.0] * 10)]
    wide = [_group([1.0] * 9 + [91.0]), _group([2.0] * 9 + [182.0])]
    assert dispersion_of(even) == 1.0
    assert dispersion_of(wide) > 5
    low, high = exposures_per_end(even) or (0, 0)
    wide_low, wide_high = exposures_per_end(wide) or (0, 0)
    assert high - low > 2 * (wide_high - wide_low)


_GROUPS = st.lists(
    st.tuples(st.lists(st.floats(0.01, 1e4), max_size=8), st.floats(0, 1e5)), min_size=1, max_size=6
)


@given(_GROUPS, st.floats(0.01, 100))
def test_beliefs_lie_between_what_a_group_and_all_showed(
    seen: list[tuple[list[float], float]], scale: float
) -> None:
    """Estimates are between the group's and the overall mean, and scale with the unit of time."""

    def groups(unit: float) -> list[RateGroup]:
        made = []
        for durations, running in seen:
            group = _group([unit * duration for duration in durations])
            group.exposure += unit * running
            made.append(group)
        return made

    expected = exposures_per_end(groups(1.0))
    if expected is None:
        return
    usual = sum(g.exposure for g in groups(1.0)) / sum(g.num_ends for g in groups(1.0))
    for group, one in zip(groups(1.0), expected, strict=True):
        own = group.exposure / group.num_ends if group.num_ends else float("inf")
        low, high = min(own, usual), max(own, usual)
        assert low * (1 - 1e-9) <= one <= high * (1 + 1e-9)
    assert exposures_per_end(groups(scale)) == pytest.approx([scale * one for one in expected], rel=1e-6)

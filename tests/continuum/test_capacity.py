"""The capacity of a group is that of its cores together."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.core_group.merged_answers import merge_answers
from engine.records.capacity import Capacity, merged, num_that_fit


def core(
    usual_blocks: list[float] | None, needed_blocks: list[int], usable_blocks: int = 100, waiting: int = 0
) -> Capacity:
    return Capacity(
        jobs_that_fit=num_that_fit(usable_blocks, needed_blocks, usual_blocks),
        waiting_jobs=waiting,
        usable_blocks=usable_blocks,
        ahead_s=[0.0, 12.5],
        needed_blocks=needed_blocks,
        usual_blocks=usual_blocks,
    )


def test_the_time_that_needs_most_decides() -> None:
    """Now three jobs would fit, later one; a need of nothing says nothing."""
    assert num_that_fit(100, [10, 20], [30.0, 60.0]) == 1
    assert num_that_fit(100, [10, 20], [30.0, 0.0]) == 3
    assert num_that_fit(100, [150, 20], [30.0, 60.0]) == 0
    assert num_that_fit(10, [5, 20], [3.0, 5e-324]) == 1


def test_what_is_not_known_is_not_zero() -> None:
    """Before any job began, nobody knows what a job needs; one core's jobs speak for the others'."""
    assert core(None, [0, 0]).jobs_that_fit is None
    assert merged([core(None, [0, 0]), core(None, [0, 0])]).jobs_that_fit is None
    assert merged([core([20.0, 25.0], [10, 20]), core(None, [0, 0], waiting=2)]) == Capacity(
        jobs_that_fit=3 + 4,
        waiting_jobs=2,
        usable_blocks=200,
        ahead_s=[0.0, 12.5],
        needed_blocks=[10, 20],
        usual_blocks=[20.0, 25.0],
    )


NEEDS = st.tuples(st.integers(0, 200), st.integers(0, 200)).map(list)
USUAL = st.none() | st.tuples(st.floats(0, 50), st.floats(0, 50)).map(list)


@given(cores=st.lists(st.builds(core, USUAL, NEEDS, st.integers(0, 300)), min_size=1, max_size=4))
def test_a_group_is_never_told_less_than_its_cores_know(cores: list[Capacity]) -> None:
    """What cores count for themselves is in the sum; of one core it is the core's own answer."""
    together = merged(cores)
    known = [each.jobs_that_fit for each in cores if each.jobs_that_fit is not None]
    assert (together.jobs_that_fit or 0) >= sum(known)
    assert merged(cores[:1]).jobs_that_fit == cores[0].jobs_that_fit


def test_a_group_whose_policy_knows_no_jobs_has_no_capacity() -> None:
    """Its cores answer None; cores that know answer with numbers, as plain types."""
    assert merge_answers("capacity", [None, None], ()) is None
    told = [msgspec.to_builtins(core([20.0, 25.0], [10, 20])) for _ in range(2)]
    assert msgspec.convert(merge_answers("capacity", told, ()), Capacity).usable_blocks == 200

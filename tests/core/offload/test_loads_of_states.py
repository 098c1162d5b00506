"""A host tier for a model with full attention and layers with states: evicted states go there whole, and are
loaded with the KV before them. Every step runs on a fake memory that fails if a request would continue from a
wrong state. Blocks have 4 tokens, and a state has 10 blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.core.offload.disk_tier import DiskLevel
from engine.core.policy import Pin
from engine.core.request import Request, RequestStatus
from tests.core.engine_room import EngineRoom
from tests.core.kv_memory import at_once
from tests.core.test_states import cached_tokens, free_states, room_of
from tests.core.test_windows import PinningPolicy

PROMPT = list(range(24))
NUM_STATES = 6
"""State slots, of which a request takes four at most."""


def evict_states(room: EngineRoom, count: int = 3) -> None:
    """Lets other prompts take all state slots."""
    for number in range(count):
        first = 1000 * len(room.tokens) + 100 * number
        room.add(f"other {len(room.tokens)}", list(range(first, first + 9)), max_tokens=1)
        room.run()


def room_with_copies(**options: Any) -> EngineRoom:
    """A room where the state after 20 tokens of the prompt is on the host only; their KV is in the pool."""
    chosen: dict[str, Any] = {"num_host_blocks": 80} | options
    room = room_of(num_states=NUM_STATES, **chosen)
    assert cached_tokens(room, "a", PROMPT) == 0
    evict_states(room)
    return room


def is_cached(room: EngineRoom, request: Request, num_tokens: int) -> bool:
    states = room.scheduler.kv.states
    assert states is not None
    return states.pool.get_cached_block(request.block_hashes[num_tokens // 4 - 1]) is not None


def test_a_state_comes_back_from_the_host() -> None:
    """Although all its KV is in the pool, a prompt is a hit only with its state loaded."""
    assert cached_tokens(room_with_copies(num_host_blocks=0), "again", PROMPT) == 0
    room = room_with_copies()
    request = room.add("again", PROMPT, max_tokens=3)
    room.step()
    assert room.last_plan is not None
    [load] = room.last_plan.kv_loads
    assert list(load.copies.block_ids) == [*range(min(load.copies.block_ids), max(load.copies.block_ids) + 1)]
    assert load.num_blocks == 10
    room.run()
    room.check_invariants()
    assert (request.num_cached_tokens, request.num_external_computed_tokens) == (20, 20)


def test_it_comes_back_with_the_blocks_before_it() -> None:
    room = room_with_copies()
    pool = room.scheduler.kv.pool
    pool.free_blocks(pool.get_new_blocks(pool.num_free_blocks))
    assert cached_tokens(room, "again", PROMPT) == 20


def test_nothing_is_loaded_where_a_part_of_the_state_is_gone() -> None:
    """If a part of the state is missing, nothing is loaded; on its next eviction the state is stored
    whole."""
    room = room_with_copies()
    states, connector = room.scheduler.kv.states, room.connector
    assert states is not None
    assert connector is not None
    request = room.add("again", PROMPT, max_tokens=1)
    connector.evict([states.layout.names_of(request.block_hashes[4])[3]])
    room.run()
    assert request.num_cached_tokens == 0
    evict_states(room)
    assert cached_tokens(room, "last", PROMPT) == 20


def test_a_tier_that_cannot_hold_a_state_gets_none() -> None:
    room = room_with_copies(num_host_blocks=9)
    assert cached_tokens(room, "again", PROMPT) == 0


def test_a_state_goes_on_to_the_disk_and_comes_back() -> None:
    """The host holds one state at a time; earlier ones go to disk and are loaded from there."""
    room = room_with_copies(num_host_blocks=14, disk_level=DiskLevel(num_blocks=200, max_writes=100))
    evict_states(room, 4)
    request = room.add("again", PROMPT, max_tokens=2)
    room.run()
    room.check_invariants()
    assert (request.num_cached_tokens, request.num_disk_tokens > 0) == (20, True)


def test_a_request_may_leave_while_its_state_is_loaded() -> None:
    """The load keeps the slot until its end is reported."""
    fates: Iterator[tuple[int, bool]] = iter([(3, True)])
    room = room_with_copies(load_fate=lambda: next(fates, at_once()))
    request = room.add("again", PROMPT, max_tokens=2)
    room.step()
    room.scheduler.finish_requests(["again"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    room.check_invariants()
    assert free_states(room) == NUM_STATES - 2
    room.run()
    assert free_states(room) == NUM_STATES - 1
    assert not is_cached(room, request, 20)


def test_a_load_that_fails_is_computed() -> None:
    fates: Iterator[tuple[int, bool]] = iter([(1, False)])
    room = room_with_copies(load_fate=lambda: next(fates, at_once()))
    assert cached_tokens(room, "again", PROMPT, max_tokens=2) == 0
    assert len(room.received["again"]) == 2


def test_copies_of_a_poisoned_state_are_evicted() -> None:
    """A state used by a request with invalid logits is removed from all tiers."""
    room = room_with_copies()
    room.failing.add("again")
    assert cached_tokens(room, "again", PROMPT) == 20
    room.failing.clear()
    assert cached_tokens(room, "last", PROMPT) == 0


class HoldsJobs(PinningPolicy):
    """Pins the turns of jobs only."""

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        return super().on_turn_end(request, now) if request.job is not None else None


@pytest.mark.parametrize("num_host_blocks", [0, 80])
def test_a_job_that_was_held_takes_its_state_along(num_host_blocks: int) -> None:
    """A job's pin keeps its state in the pool; when the pin has ended, the state goes to the host like the
    KV."""
    policy = HoldsJobs()
    room = room_of(policy, num_states=NUM_STATES, num_host_blocks=num_host_blocks)
    turn = room.add("a", PROMPT, max_tokens=1, job_id="job")
    room.run()
    evict_states(room)
    assert is_cached(room, turn, 24)
    room.scheduler.close(room.clock.now())
    evict_states(room, 8)
    assert not is_cached(room, turn, 24)
    following = [*turn.all_token_ids, 7, 8]
    assert cached_tokens(room, "next", following) == (24 if num_host_blocks else 0)

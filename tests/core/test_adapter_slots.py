"""The number of running adapters is bounded, and no request waits forever for an adapter slot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.core.request import Request
from engine.records.adapters import Adapter
from tests.core.engine_room import EngineRoom

Requests = st.lists(st.tuples(st.sampled_from((None, "a", "b", "c", "d")), st.integers(1, 12)), max_size=30)


def adapters_in(room: EngineRoom) -> set[str]:
    return {request.adapter for request in room.scheduler.running if request.adapter is not None}


def add(room: EngineRoom, request_id: str, adapter: str | None, max_tokens: int = 4) -> Request:
    key = None if adapter is None else Adapter(adapter, "/", "0").key
    return room.add(request_id, [7] * 6, max_tokens=max_tokens, adapter=key)


@given(requests=Requests, max_loras=st.integers(1, 3), num_blocks=st.integers(12, 40))
def test_no_more_run_than_may(
    requests: list[tuple[str | None, int]], max_loras: int, num_blocks: int
) -> None:
    """The bound holds for any requests and pool, and all requests end."""
    room = EngineRoom(num_blocks=num_blocks, max_num_seqs=8, max_loras=max_loras)
    for index, (adapter, max_tokens) in enumerate(requests):
        add(room, f"r{index}", adapter, max_tokens)
        room.step()
        assert len(adapters_in(room)) <= max_loras
    while room.scheduler.has_unfinished_requests():
        room.step()
        assert len(adapters_in(room)) <= max_loras
    assert len(room.finished) == len(requests)


def test_those_behind_one_that_is_set_aside_go_first() -> None:
    room = EngineRoom(max_loras=1)
    add(room, "first", "a", max_tokens=20)
    room.step()
    for request_id, adapter in (("other", "b"), ("same", "a"), ("none", None)):
        add(room, request_id, adapter)
    room.step()
    assert [request.request_id for request in room.scheduler.running] == ["first", "same", "none"]
    room.run()
    assert set(room.finished) == {"first", "other", "same", "none"}


def test_nobody_is_set_aside_for_ever() -> None:
    """While requests of one adapter keep arriving, a request of another one is served."""
    room = EngineRoom(max_loras=1)
    add(room, "first", "a", max_tokens=12)
    room.step()
    add(room, "other", "b")
    number = 0
    while "other" not in room.finished:
        add(room, f"more{number}", "a", max_tokens=12)
        number += 1
        room.step(seconds=0.5)
        assert number < 100, "it waits for ever"


def test_keys_of_blocks_are_apart() -> None:
    """A prompt with another adapter, or none, hits nothing of the first one; with the same adapter it
    does."""
    room = EngineRoom(max_loras=4, block_size=4)
    cached = []
    for request_id, adapter in (("1", "a"), ("2", "b"), ("3", None), ("4", "a")):
        request = add(room, request_id, adapter)
        room.run()
        cached.append(request.num_cached_tokens)
    assert cached == [0, 0, 0, 4]

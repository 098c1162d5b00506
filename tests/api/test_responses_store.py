"""Promises of the store of responses, checked on both implementations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.api.openai_responses.items import (
    ConversationId,
    Response,
    TextConfig,
    item_id,
    new_response_id,
    response_of_item,
)
from engine.api.openai_responses.memory_store import MemoryStore
from engine.api.openai_responses.sqlite_store import SqliteStore
from engine.api.openai_responses.store import (
    RENEWED_FOR_S,
    ResponseNotStoredError,
    ResponseStore,
    StoredResponse,
    StoreLimits,
)
from engine.clock import ManualClock

LIMITS = StoreLimits(max_responses=4, max_bytes=100_000)


def stored(name: str, *, after: str | None = None, text: str = "hello", **fields: object) -> StoredResponse:
    response = Response(
        id=name,
        created_at=0,
        model="tiny",
        temperature=1.0,
        top_p=1.0,
        text=TextConfig(format={"type": "text"}),
        **{"status": "completed", **fields},  # type: ignore[arg-type]
    )
    return StoredResponse(response=response, input=[{"id": "i", "content": text}], previous_id=after)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Iterator[ResponseStore]:
    if request.param == "memory":
        yield MemoryStore(LIMITS, clock.now)
        return
    sqlite = SqliteStore(tmp_path, LIMITS, clock.now)
    yield sqlite
    sqlite.close()


async def kept(store: ResponseStore, *names: str) -> list[str]:
    """Those of these ids that are stored, read in this order."""
    return [name for name in names if await store.get(name) is not None]


async def test_what_is_put_is_got(store: ResponseStore) -> None:
    """A stored response can be read repeatedly; its later state replaces the first."""
    first = stored("a", status="in_progress")
    await store.put(first)
    assert await store.get("a") == first
    last = stored("a", text="more")
    await store.put(last)
    assert await store.get("a") == last
    assert await store.delete("a")
    assert await store.get("a") is None
    assert not await store.delete("a")


async def test_what_was_deleted_does_not_come_back(store: ResponseStore) -> None:
    """A later state replaces an earlier one, but does not restore a deleted response."""
    await store.put(stored("a", status="in_progress"))
    last = stored("a", text="more")
    assert await store.update(last)
    assert await store.get("a") == last
    await store.delete("a")
    assert not await store.update(last)
    assert await store.get("a") is None


async def test_the_least_recently_used_goes_first(store: ResponseStore) -> None:
    """The number of responses is bounded; reading one counts as use."""
    for name in "abcd":
        await store.put(stored(name))
    await store.get("a")
    await store.put(stored("e"))
    await store.put(stored("f"))
    assert await kept(store, *"abcdef") == list("adef")


async def test_bytes_are_bounded_too(store: ResponseStore) -> None:
    """Bytes are bounded too: large responses evict others, an oversized one is evicted; replaced ones count
    once."""
    for _ in range(5):
        await store.put(stored("a", text="x" * 40_000))
    await store.put(stored("b", text="x" * 40_000))
    assert await kept(store, "a", "b") == ["a", "b"]
    await store.put(stored("c", text="x" * 40_000))
    assert await kept(store, "a", "b", "c") == ["b", "c"]
    await store.put(stored("d", text="x" * 200_000))
    assert await kept(store, "b", "c", "d") == []
    await store.put(stored("e"))
    assert await kept(store, "e") == ["e"]


async def test_what_is_being_made_does_not_make_room(store: ResponseStore, clock: ManualClock) -> None:
    """Running responses do not count against the bounds, in number or bytes. They count once they have ended
    or their process is lost."""
    running = [f"r{n}" for n in range(6)]
    for name in running:
        await store.put(stored(name, status="in_progress", text="x" * 90_000))
    for name in "abcde":
        await store.put(stored(name))
    assert [await store.renew(name) for name in running] == [True] * 6
    assert await kept(store, *running, *"abcde") == [*running, *"bcde"]
    await store.put(stored("r0"))
    assert await kept(store, "r0", *"bcde") == ["r0", *"cde"]
    clock.advance(RENEWED_FOR_S + 1)
    await store.put(stored("f"))
    assert await kept(store, *running, *"cdef") == [*"cde", "f"]


async def test_a_chain_is_used_as_a_whole(store: ResponseStore) -> None:
    """The chain before a response is read oldest first and stays together; a missing response is named."""
    await store.put(stored("a"))
    await store.put(stored("b", after="a"))
    await store.put(stored("x"))
    assert [link.response.id for link in await store.chain("b", "previous_response_id")] == ["a", "b"]
    await store.put(stored("y"))
    await store.put(stored("z"))
    assert await kept(store, *"abxyz") == list("abyz")
    await store.delete("a")
    with pytest.raises(ResponseNotStoredError, match="Response 'a', which 'b' continues") as caught:
        await store.chain("b", "previous_response_id")
    assert caught.value.field == "previous_response_id"


async def test_a_conversation_goes_on_from_its_newest(store: ResponseStore) -> None:
    """A failed response is not the newest; if the newest is deleted, so is the conversation."""
    named = ConversationId("conv")
    await store.put(stored("a", conversation=named))
    await store.put(stored("b", after="a", conversation=named))
    await store.put(stored("c", after="b", conversation=named, status="failed"))
    assert await store.newest("conv") == "b"
    await store.delete("b")
    assert await store.newest("conv") is None
    assert await store.newest("another") is None


async def test_a_run_learns_that_it_shall_end(store: ResponseStore) -> None:
    """A run learns that it was cancelled or deleted."""
    for name in "ab":
        await store.put(stored(name, status="in_progress"))
        assert await store.renew(name)
    await store.cancel("a")
    await store.delete("b")
    assert not await store.renew("a")
    assert not await store.renew("b")


async def test_processes_share_a_file(tmp_path: Path) -> None:
    """One process reads what another stored; the bounds hold for both together."""
    one, other = SqliteStore(tmp_path, LIMITS), SqliteStore(tmp_path, LIMITS)
    await asyncio.gather(*((one if n % 2 else other).put(stored(f"r{n}")) for n in range(40)))
    names = [f"r{n}" for n in range(40)]
    assert len(await kept(one, *names)) == LIMITS.max_responses
    await one.put(stored("last", status="in_progress"))
    await other.cancel("last")
    assert not await one.renew("last")
    one.close()
    other.close()


async def test_a_lost_run_has_failed(store: ResponseStore, clock: ManualClock) -> None:
    """A background response whose process is lost becomes failed."""
    await store.put(stored("a", status="in_progress"))
    clock.advance(RENEWED_FOR_S - 1)
    assert await store.renew("a")
    clock.advance(RENEWED_FOR_S - 1)
    found = await store.get("a")
    assert found is not None
    assert found.response.status == "in_progress"
    clock.advance(2)
    found = await store.get("a")
    assert found is not None
    assert found.response.status == "failed"
    assert found.response.error is not None


async def test_a_conversation_is_locked_by_one_turn(store: ResponseStore) -> None:
    """The lock ends when its turn's response ends or unlocks it; other responses cannot unlock it."""
    assert await store.lock("conv", "a")
    assert not await store.lock("conv", "b")
    assert await store.lock("another", "c")
    await store.put(stored("a", conversation=ConversationId("conv"), status="queued"))
    await store.put(stored("b"))
    await store.unlock("b")
    assert not await store.lock("conv", "d")
    await store.put(stored("a", conversation=ConversationId("conv")))
    assert await store.lock("conv", "d")
    await store.unlock("d")
    assert await store.lock("conv", "e")


async def test_the_lock_of_a_lost_turn_ends(store: ResponseStore, clock: ManualClock) -> None:
    """A lock ends if it is not renewed; late calls of its turn do not unlock the next turn's lock."""
    assert await store.lock("conv", "a")
    for _ in range(3):
        clock.advance(RENEWED_FOR_S - 1)
        assert not await store.renew("a")  # No response is stored yet.
        assert not await store.lock("conv", "b")
    clock.advance(RENEWED_FOR_S + 1)
    assert await store.lock("conv", "b")
    await store.renew("a")
    await store.unlock("a")
    assert not await store.lock("conv", "c")


async def test_a_lock_holds_in_all_processes(tmp_path: Path) -> None:
    """Of turns that begin concurrently exactly one gets the lock."""
    one, other = SqliteStore(tmp_path, LIMITS), SqliteStore(tmp_path, LIMITS)
    tries = ((one if n % 2 else other).lock("conv", f"r{n}") for n in range(20))
    assert sorted(await asyncio.gather(*tries)) == [False] * 19 + [True]
    one.close()
    other.close()


def test_an_items_id_leads_to_its_response() -> None:
    """A reference to an item finds its response without an index."""
    response_id = new_response_id()
    assert response_of_item(item_id("msg", response_id, 3)) == response_id
    assert response_of_item(item_id("fc", response_id, 0x8000)) == response_id
    assert response_of_item("msg_1") is None


async def test_each_owner_has_his_own(store: ResponseStore) -> None:
    """Each owner has separate responses, conversations and locks, also under equal names."""
    alice, bob = store.of("alice"), store.of("bob")
    first = stored("a", conversation=ConversationId("c"))
    await alice.put(first)
    for other in (store, bob):
        for name in ("a", "alice/a"):
            assert await other.get(name) is None
            assert not await other.delete(name)
            assert not await other.update(stored(name))
            assert not await other.renew(name)
            await other.cancel(name)
            with pytest.raises(ResponseNotStoredError):
                await other.chain(name, "response_id")
        assert await other.newest("c") is None
    assert await alice.lock("c", "b")
    assert await bob.lock("c", "b")
    await bob.unlock("b")
    assert not await alice.lock("c", "d")
    assert await store.of("alice").get("a") == first
    assert await alice.newest("c") == "a"
    assert [turn.response.id for turn in await alice.chain("a", "response_id")] == ["a"]


async def test_who_keeps_most_makes_room(store: ResponseStore) -> None:
    """The owner with most responses loses the oldest ones; another owner's older ones stay."""
    alice, bob = store.of("alice"), store.of("bob")
    await bob.put(stored("old"))
    for number in range(8):
        await alice.put(stored(f"a{number}"))
    assert await kept(bob, "old") == ["old"]
    assert await kept(alice, *(f"a{number}" for number in range(8))) == ["a5", "a6", "a7"]

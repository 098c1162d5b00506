"""Leases of KV: no block is overwritten while a reader may read it."""

from __future__ import annotations

from random import Random

import pytest

from engine.core.outputs import CachedRequestData, ModelRunnerOutput, NewKVLease, SchedulerOutput
from engine.core.request import Request, RequestStatus
from engine.records.kv_cache_groups import KVCacheGroup
from engine.records.kv_transfer import KVLeaseOrder
from engine.records.messages import JobRef
from tests.core.engine_room import EngineRoom
from tests.core.offload.test_kv_loads import LAYOUTS

BLOCK = 4
LEASE_S = 1.0


def ordered(
    room: EngineRoom, request_id: str, prompt: list[int], max_tokens: int = 1, tenant: str | None = None
) -> Request:
    """A request whose KV is to be leased."""
    job = None if tenant is None else JobRef(request_id, tenant=tenant)
    request = room.add(request_id, prompt, max_tokens=max_tokens, job=job)
    request.kv_transfer = KVLeaseOrder(request_id, LEASE_S)
    return request


def said(room: EngineRoom, *, released: list[str] | None = None, renewed: list[str] | None = None) -> None:
    """Reports messages of readers to the scheduler."""
    result = ModelRunnerOutput([], [], released_kv_leases=released or [], renewed_kv_leases=renewed or [])
    plan = SchedulerOutput([], CachedRequestData(), {}, 0, set(), set())
    room.scheduler.leases.take(plan, result, room.clock.now())
    room.scheduler.expire(room.clock.now())


def test_a_lease_is_held_until_it_is_read() -> None:
    """The lease names all full blocks that the reader can use; afterwards they are cached like others."""
    room = EngineRoom(block_size=BLOCK)
    ordered(room, "a", list(range(13)))
    room.run()
    leased = room.finished["a"].kv_leased
    assert leased is not None
    assert leased.num_tokens == 12
    plan = room.step()
    (lease,) = plan.kv_leases
    assert [list(lease.blocks.values())] == leased.block_ids
    assert room.scheduler.kv.num_pins == 1
    said(room, released=["a"])
    assert room.scheduler.kv.num_pins == 0
    assert list(room.step().ended_kv_leases) == ["a"]
    room.add("b", list(range(13)))
    room.run()
    assert room.finished["b"].num_cached_tokens == 12


def test_the_reader_computes_the_last_token() -> None:
    """If a prompt fills its last block, the lease ends with the block before."""
    room = EngineRoom(block_size=BLOCK)
    ordered(room, "a", list(range(12)))
    room.run()
    leased = room.finished["a"].kv_leased
    assert leased is not None
    assert leased.num_tokens == 8


def test_time_ends_a_lease_and_a_renewal_does_not() -> None:
    room = EngineRoom(block_size=BLOCK)
    for name in ("renewed", "forgotten"):
        ordered(room, name, [ord(name[0]) + i for i in range(9)])
    room.run()
    room.clock.advance(0.9)
    said(room, renewed=["renewed"])
    room.clock.advance(0.5)
    said(room)
    assert room.scheduler.leases.requests_of(["renewed", "forgotten"]) == ["renewed"]
    room.clock.advance(1.0)
    said(room, renewed=["forgotten"])
    assert not room.scheduler.leases


def test_a_request_that_needs_all_memory_gets_it() -> None:
    """If nothing else runs, a lease ends for a request that needs its blocks, and the reader is informed."""
    room = EngineRoom(block_size=BLOCK, num_blocks=9)
    ordered(room, "a", list(range(25)))
    room.run()
    room.step()
    room.add("b", list(range(100, 130)), max_tokens=1)
    ended: list[str] = []
    while "b" not in room.finished:
        ended += room.step().ended_kv_leases
    ended += room.step().ended_kv_leases
    assert ended == ["a"]
    assert not room.scheduler.leases


@pytest.mark.parametrize(("num_leases", "gives_way"), [(2, False), (3, True)])
def test_no_tenant_leases_the_pool_away(num_leases: int, gives_way: bool) -> None:
    """While something runs, a request waits for another tenant's leases up to half of the pool; the tenant's
    own requests wait for all of them."""
    room = EngineRoom(block_size=BLOCK, num_blocks=25)
    for number in range(num_leases):
        ordered(room, f"a{number}", [number * 50 + i for i in range(21)], tenant="a")
        room.run()
    room.add("runs", list(range(900, 904)), max_tokens=24, job=JobRef("runs", tenant="b"))
    room.step()
    need = 4 * (room.scheduler.kv.num_free_blocks + 2)
    room.add("own", list(range(600, 600 + need)), max_tokens=1, job=JobRef("own", tenant="a"))
    room.step()
    assert len(room.scheduler.leases) == num_leases
    room.scheduler.finish_requests(["own"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    room.add("other", list(range(700, 700 + need)), max_tokens=1, job=JobRef("other", tenant="c"))
    assert bool(room.step().ended_kv_leases) is gives_way


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("overlap", [False, True], ids=["one step", "two steps"])
@pytest.mark.parametrize("seed", range(12))
def test_no_leased_block_is_overwritten(seed: int, overlap: bool, groups: tuple[KVCacheGroup, ...]) -> None:
    """Random requests, aborts, reads and waits, in a pool that is too small, overwrite no leased block."""
    random = Random(seed)
    room = EngineRoom(
        block_size=BLOCK,
        num_blocks=26 * len(groups),
        kv_cache_groups=groups,
        async_scheduling=overlap,
        max_num_seqs=3,
    )
    open_leases: dict[str, NewKVLease] = {}
    num_told = num_ended = 0
    shared = [random.randrange(1000) for _ in range(20)]
    for turn in range(160):
        if random.random() < 0.4:
            prompt = shared[: random.choice((0, 8, 20))]
            prompt += [random.randrange(1000) for _ in range(random.randint(1, 24))]
            if random.random() < 0.6:
                ordered(room, f"r{turn}", prompt, random.randint(1, 3))
            else:
                room.add(f"r{turn}", prompt, max_tokens=random.randint(1, 12))
        if random.random() < 0.1 and room.scheduler.requests:
            victim = random.choice(sorted(room.scheduler.requests))
            room.scheduler.finish_requests([victim], RequestStatus.FINISHED_ABORTED, room.clock.now())
        plan = room.step(random.choice((0.01, 0.01, 0.4)))
        for lease_id in plan.ended_kv_leases:
            open_leases.pop(lease_id, None)
            num_ended += 1
        open_leases |= {lease.lease_id: lease for lease in plan.kv_leases}
        num_told += len(plan.kv_leases)
        blocks = room.scheduler.kv.pool.blocks
        for lease in open_leases.values():
            for name, block_id in lease.blocks.items():
                assert blocks[block_id].block_hash == name, "a reader would read another's KV"
        if open_leases and random.random() < 0.5:
            some = random.sample(sorted(open_leases), 1)
            said(room, **{random.choice(("released", "renewed")): some})
        room.check_invariants()
    room.run()
    assert num_told > 15
    assert num_ended > 5

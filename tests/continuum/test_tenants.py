"""Tenants share the pin budget: fairly when it is short, and fully available to one that is alone."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum.jobs.job import BranchTip, Job
from continuum.retention.pins import PinTable
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.policy import Pin
from engine.records.block_chain import BlockChain
from engine.records.messages import TurnReceipt
from tests.continuum.job_room import BLOCK, JobRoom

LONG_S = 600.0
JOB_BLOCKS = 4
BUDGET = 64
"""Blocks that may be pinned, of 128."""


def job_room(**options: object) -> JobRoom:
    """A room where tools run for long and pins last until they are done."""
    settings = {"ttl_rule": "fixed", "fixed_ttl_s": LONG_S, "max_wait_s": LONG_S, "pin_budget": 0.5}
    return JobRoom(**{**settings, **options})  # type: ignore[arg-type]


class Jobs:
    """Runs first turns of new jobs, each with a different prompt and a tool that runs."""

    def __init__(self, room: JobRoom) -> None:
        self._room = room
        self._numbers = count()

    def begin(self, tenant: str | None, num_jobs: int = 1, num_blocks: int = JOB_BLOCKS) -> list[TurnReceipt]:
        return [self._begin(tenant, num_blocks) for _ in range(num_jobs)]

    def _begin(self, tenant: str | None, num_blocks: int) -> TurnReceipt:
        number = next(self._numbers)
        prompt = [number] * (num_blocks * BLOCK)
        receipt = self._room.turn(f"r{number}", prompt, f"job{number}", tenant=tenant, max_tokens=1)
        self._room.advance(0.01)
        return receipt

    def held(self) -> dict[str | None, int]:
        """Pinned blocks by tenant, for tenants with any."""
        held: dict[str | None, int] = {}
        for job in self._room.policy.jobs(1000, self._room.clock.now()):
            held[job.tenant] = held.get(job.tenant, 0) + sum(each.pinned_blocks for each in job.branches)
        return {tenant: blocks for tenant, blocks in held.items() if blocks}


@pytest.mark.parametrize("tenant", ["greedy", None])
def test_a_tenant_that_is_alone_may_hold_all(tenant: str | None) -> None:
    """A tenant that is alone may use the whole budget; requests without a tenant count as one tenant."""
    jobs = Jobs(job_room())
    receipts = jobs.begin(tenant, 18)
    assert jobs.held() == {tenant: BUDGET}
    assert [receipt.pinned_tokens > 0 for receipt in receipts] == [True] * 16 + [False] * 2
    assert receipts[-1].reason == "pin budget is used up"


def test_who_holds_most_gives_way_to_who_comes_short() -> None:
    """When a second and a third tenant arrive at a full budget, each has what it wants or an equal share. The
    first one's older jobs have no precedence, and its new jobs get nothing back."""
    jobs = Jobs(job_room())
    jobs.begin("greedy", 16)
    jobs.begin("modest", 3)
    assert jobs.held() == {"greedy": BUDGET - 12, "modest": 12}
    jobs.begin("ann", 12)
    assert jobs.held() == {"greedy": 28, "modest": 12, "ann": 24}
    assert all(not receipt.pinned_tokens for receipt in jobs.begin("greedy", 4))
    assert jobs.held() == {"greedy": 28, "modest": 12, "ann": 24}


def test_of_one_tenants_jobs_the_youngest_gives_way() -> None:
    """The job that began first keeps its pin."""
    room = job_room()
    jobs = Jobs(room)
    jobs.begin("greedy", 16)
    jobs.begin("ann", 2)
    known = (room.policy.job(f"job{number}", room.clock.now()) for number in range(16))
    held = [any(tip.pinned_blocks for tip in job.branches) for job in known if job is not None]
    assert held == [True] * 14 + [False] * 2


def test_an_operator_may_keep_some_back_even_from_a_tenant_that_is_alone() -> None:
    """Beyond ``pin_tenant_share`` a tenant's own younger jobs lose pins, never another tenant's."""
    jobs = Jobs(job_room(pin_tenant_share=0.5))
    jobs.begin("greedy", 10)
    jobs.begin("ann", 2)
    jobs.begin("greedy", 1)
    assert jobs.held() == {"greedy": BUDGET // 2, "ann": 8}


@pytest.mark.parametrize(("num_held", "is_broken"), [(12, False), (17, True)])
def test_a_turn_that_is_back_takes_nothing_of_an_equal_part(num_held: int, is_broken: bool) -> None:
    """An older job's turn that finds no free blocks takes pins of another tenant's younger jobs only beyond
    that tenant's equal share."""
    room = job_room(pin_budget=0.9)
    jobs = Jobs(room)
    jobs.begin("greedy", 1, num_blocks=2)
    jobs.begin("ann", num_held)
    num_tokens = room.scheduler.statistics().num_free_blocks * BLOCK // 2
    for number in (1, 2):
        prompt = [900 + number] * (num_tokens - 60)
        room.ask(f"busy{number}", prompt, f"busy{number}", tenant="greedy", max_tokens=50)
    while len(room.step().scheduled_cached_reqs.req_ids) < 2:
        pass
    room.advance(LONG_S / 2)
    room.ask("back", [0] * (20 * BLOCK), "job0", tenant="greedy", max_tokens=1)
    for _ in range(3):
        room.step()
    held_blocks = jobs.held()["ann"]
    assert (held_blocks < num_held * JOB_BLOCKS) is is_broken
    room.run()


# ---- the table of pins ----

TENANTS = ("", "ann", "bob", "eve")
SMALL_BUDGET = 12


class Table:
    """A small budget, and tenants that reserve from it."""

    def __init__(self) -> None:
        self.pins = PinTable(SMALL_BUDGET, 1.0)
        self._numbers = count()

    def held(self) -> dict[str, int]:
        held = dict.fromkeys(TENANTS, 0)
        for pin in self.pins:
            held[self.pins.tip_of(pin).job.tenant or ""] += pin.num_blocks
        return held

    def reserve(self, tenant: str, rank: float, num_blocks: int) -> BranchTip | None:
        """Reserves a tip of a job, after revoking the pins that give way to it; None if the budget does not
        allow it."""
        name = str(next(self._numbers))
        job = Job(name, tenant or None, rank, rank, rank)
        fits = self.pins.reserve(job, num_blocks)
        for pin, cause in self.pins.due(0.0):
            assert fits, "no pin is revoked for nothing"
            self.pins.ended(pin, cause)
        return BranchTip(job, name, 1, BlockChain([]), 0, 0.0, job.place) if fits else None

    def hold(self, tip: BranchTip, num_blocks: int) -> None:
        number = int(tip.request_id)
        hashes = [BlockHash(bytes(32))] * num_blocks
        self.pins.add(Pin(number, tip.job.job_id, tip.request_id, hashes, LONG_S), tip)


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(0, 50), st.integers(1, 5)), max_size=40))
def test_who_gives_way_had_more_and_is_left_no_less(wants: list[tuple[str, int, int]]) -> None:
    """Free blocks are always granted. Otherwise another tenant loses pins only if it held more than the taker
    ends with, and it keeps at least what the taker had."""
    table = Table()
    for tenant, rank, num_blocks in wants:
        before = table.held()
        tip = table.reserve(tenant, rank, num_blocks)
        after = table.held()
        if sum(before.values()) + num_blocks <= SMALL_BUDGET:
            assert tip is not None
            assert after == before
        for other in set(TENANTS) - {tenant}:
            if after[other] < before[other]:
                assert before[other] > after[tenant] + num_blocks
                assert after[other] >= after[tenant]
        if tip is not None:
            table.hold(tip, num_blocks)
        assert sum(table.held().values()) <= SMALL_BUDGET


@given(st.lists(st.sampled_from(TENANTS), min_size=SMALL_BUDGET, max_size=60))
def test_a_tenant_comes_short_only_of_more_than_its_part(wants: list[str]) -> None:
    """With requests of one block, a refused tenant holds as many as any other, up to one block."""
    table = Table()
    for rank, tenant in enumerate(wants):
        tip = table.reserve(tenant, rank, 1)
        if tip is None:
            held = table.held()
            assert sum(held.values()) == SMALL_BUDGET
            assert max(held.values()) <= held[tenant] + 1
        else:
            table.hold(tip, 1)

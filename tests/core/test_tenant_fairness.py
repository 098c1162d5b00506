"""Promises to a tenant next to one that floods the engine: slots in the batch, memory, and short steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy
from engine.core.fairness.fair_queue import FairQueue
from engine.core.fairness.step_shares import StepCost
from engine.core.fairness.tenant_slots import TenantSlots
from engine.core.policy import FcfsPolicy, PolicyContext, PriorityPolicy, SchedulingPolicy
from engine.core.request import Request
from engine.records.messages import JobRef
from engine.records.sampling_params import SamplingParams
from tests.core.engine_room import EngineRoom

POLICIES = ("fcfs", "priority", "continuum")
TOKEN_S, EMPTY_STEP_TOKENS = 0.00015, 25
"""The time of a step: that of its tokens, and a fixed cost worth this many tokens."""


def make(name: str, num_blocks: int) -> SchedulingPolicy:
    if name == "continuum":
        return ContinuumPolicy(PolicyContext(16, num_blocks - 1), ContinuumConfig())
    return PriorityPolicy() if name == "priority" else FcfsPolicy()


def of(tenant: str | None, *, is_owner: bool = False) -> JobRef:
    return JobRef(None, tenant=tenant, owner=tenant if is_owner else None)


def prompt(number: int, length: int) -> list[int]:
    return [number, *range(1000, 1000 + length - 1)]


def running(room: EngineRoom) -> Counter[str]:
    return Counter(request.tenant for request in room.scheduler.running)


# ---- the queue ----


def request_of(tenant: str, number: int) -> Request:
    job = JobRef(None, tenant=tenant)
    return Request(f"r{number}", [1], SamplingParams(max_tokens=1), 0.0, job=job)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "prepend", "rekey", "remove", "start", "start", "end", "aside"]),
        st.sampled_from("abc"),
        st.integers(0, 2),
    ),
    max_size=60,
)


@given(OPERATIONS)
def test_who_has_fewest_places_is_next(operations: list[tuple[str, str, int]]) -> None:
    """For any operations the next request belongs to the tenant with fewest slots; within it key and arrival
    decide. It equals a search of all requests."""
    slots = TenantSlots()
    queue = FairQueue(slots, lambda request: False)
    waiting: dict[Request, tuple[int, int]] = {}
    with_slot: list[Request] = []
    for number, (operation, tenant, key) in enumerate(operations):
        if operation in ("add", "prepend"):
            new = request_of(tenant, number)
            getattr(queue, operation)(new, (key,))
            waiting[new] = (key, number if operation == "add" else -number)
        elif operation == "end" and with_slot:
            ended = with_slot.pop(key % len(with_slot))
            slots.give_back(ended)
            queue.touch(ended.tenant)
        elif waiting and operation == "rekey":
            last = list(waiting)[-1]
            queue.rekey(last, (key,))
            waiting[last] = (key, waiting[last][1])
        elif waiting and operation == "remove":
            last, _ = waiting.popitem()
            queue.remove(last)
        elif waiting and operation == "aside":
            queue.skip()
            queue.resume()
        elif waiting and operation == "start":
            expected = min(waiting, key=lambda each: (slots.held(each.tenant), *waiting[each]))
            assert queue.peek() is expected
            started = queue.pop()
            del waiting[started]
            slots.take(started, is_overdue=False)
            queue.touch(started.tenant)
            with_slot.append(started)
        assert len(queue) == len(waiting)
        assert set(queue) == set(waiting)
        slots.check_invariants(with_slot)


def test_a_flood_of_overdue_requests_passes_nobody() -> None:
    """One overdue request per tenant ranks with tenants that have nothing; then others are next again."""
    slots = TenantSlots()
    queue = FairQueue(slots, lambda request: request.tenant == "flood")
    for number in range(4):
        queue.add(request_of("flood", number), (0,))
    order = []
    for number in range(10, 14):
        if number == 12:
            queue.add(request_of("quiet", number), (1,))
        request = queue.peek()
        assert request is not None
        order.append(request.tenant)
        queue.remove(request)
        slots.take(request, is_overdue=request.tenant == "flood")
        queue.touch(request.tenant)
    assert order == ["flood", "flood", "quiet", "flood"]


# ---- places and memory ----


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_batch_makes_a_place(policy: str) -> None:
    """If one tenant has all slots, another's first request gets one at once, by preemption. Then slots are
    shared equally as they become free, without preemption."""
    room = EngineRoom(make(policy, 400), block_size=16, num_blocks=400, max_model_len=256)
    for number in range(8):
        room.add(f"a{number}", prompt(number, 20), max_tokens=40, job=of("alice"))
    for _ in range(3):
        room.step()
    assert running(room) == {"alice": 4}
    for number in range(8):
        room.add(f"b{number}", prompt(100 + number, 20), max_tokens=40, job=of("bob"))
    room.step()
    room.check_invariants()
    assert running(room) == {"alice": 2, "bob": 2}
    preempted = sum(request.num_preemptions for request in room.scheduler.requests.values())
    assert preempted == 2
    room.run()
    assert len(room.finished) == 16
    assert all(len(room.received[name]) == 40 for name in room.finished)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reserve", [True, False])
def test_a_full_pool_makes_room(policy: str, reserve: bool) -> None:
    """The same holds for memory that one tenant has filled; its growing requests take none from the other."""
    room = EngineRoom(
        make(policy, 33),
        block_size=16,
        num_blocks=33,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        scheduler_reserve_full_isl=reserve,
    )
    for number in range(4):
        room.add(f"a{number}", prompt(number, 128), max_tokens=60, job=of("alice"))
    room.step()
    room.add("b", prompt(100, 100), max_tokens=30, job=of("bob"))
    for _ in range(40):
        room.step()
        room.check_invariants()
    assert "b" in room.finished
    assert room.finished["b"].num_preemptions == 0
    room.run()
    assert len(room.finished) == 5


def crowded_prefill(num_blocks: int) -> EngineRoom:
    """A room where alice's third request computes its blocks 5 to 8 next, and is her first victim."""
    room = EngineRoom(
        PriorityPolicy(),
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=16,
        scheduler_reserve_full_isl=False,
    )
    for number in range(2):
        room.add(f"a{number}", prompt(number, 9), max_tokens=3, job=of("alice"))
    room.add("long", prompt(9, 40), priority=1, job=of("alice"))
    room.step()
    assert room.scheduler.requests["long"].num_computed_tokens == 16
    return room


def test_a_victim_takes_along_what_it_was_to_compute() -> None:
    """Bob's prompt hits blocks that the victim would have filled in this step, so bob's request does not run
    with them."""
    room = crowded_prefill(num_blocks=15)
    room.add("b", [*prompt(9, 24), 1, 2, 3, 4], job=of("bob"))
    plan = room.step()
    assert plan.preempted_req_ids == {"long"}
    room.check_invariants()
    room.run()
    assert {"b", "long"} <= room.finished.keys()


def test_what_somebody_has_hit_is_computed() -> None:
    """A request that fills blocks which bob hits in the same step cannot become a victim in it."""
    room = crowded_prefill(num_blocks=16)
    room.add("b", [*prompt(9, 24), 1, 2, 3, 4], job=of("bob"))
    room.add("c", prompt(50, 12), job=of("carol"))
    plan = room.step()
    assert {"long", "b"} <= plan.num_scheduled_tokens.keys()
    room.check_invariants()
    room.run()
    assert {"b", "c", "long"} <= room.finished.keys()


def test_nothing_is_preempted_in_vain() -> None:
    """A request that does not fit even after all allowed preemptions waits, and preempts none."""
    room = EngineRoom(block_size=16, num_blocks=17, max_model_len=256, max_num_batched_tokens=512)
    for number in range(2):
        room.add(f"a{number}", prompt(number, 100), max_tokens=20, job=of("alice"))
    room.step()
    room.add("b", prompt(100, 200), max_tokens=4, job=of("bob"))
    room.run()
    assert sum(room.finished[name].num_preemptions for name in room.finished) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("aaaabc"), st.integers(1, 60), st.integers(1, 12), st.integers(0, 5)),
        max_size=40,
    ),
    st.sampled_from(POLICIES),
    st.booleans(),
    st.booleans(),
)
def test_everybody_is_served(
    arrivals: list[tuple[str, int, int, int]], policy: str, is_async: bool, is_owner: bool
) -> None:
    """Any traffic of several tenants ends with the right outputs. While a tenant waits, no other has two more
    slots of which one could be given up."""
    room = EngineRoom(
        make(policy, 40),
        block_size=4,
        num_blocks=40,
        max_model_len=96,
        max_num_seqs=6,
        async_scheduling=is_async,
    )
    for number, (tenant, length, max_tokens, steps) in enumerate(arrivals):
        job = of(tenant, is_owner=is_owner)
        room.add(f"{tenant}{number}", prompt(number, length), max_tokens=max_tokens, job=job)
        for _ in range(steps):
            room.step()
            room.check_invariants()
    room.run(5000)
    assert len(room.finished) == len(arrivals)
    for number, (tenant, _, max_tokens, _) in enumerate(arrivals):
        assert len(room.received[f"{tenant}{number}"]) == max_tokens


# ---- steps ----


class Traffic:
    """A flood that keeps ``flood_size`` requests in flight, and a quiet tenant that sends a small one now and
    then."""

    def __init__(self, policy: str, flood_size: int, prompt_tokens: int = 250) -> None:
        self.room = EngineRoom(
            make(policy, 1000),
            block_size=16,
            num_blocks=1000,
            max_model_len=1024,
            max_num_seqs=32,
            max_num_batched_tokens=2048,
        )
        self._flood_size = flood_size
        self._prompt_tokens = prompt_tokens
        self._ids = count()
        self._flood: set[str] = set()

    def step(self) -> None:
        self._flood -= self.room.finished.keys()
        while len(self._flood) < self._flood_size:
            number = next(self._ids)
            name = f"flood{number}"
            tokens = prompt(number, self._prompt_tokens)
            self.room.add(name, tokens, max_tokens=16, job=of("flood", is_owner=True))
            self._flood.add(name)
        plan = self.room.plan_next()
        self.room.take_output((EMPTY_STEP_TOKENS + plan.total_num_scheduled_tokens) * TOKEN_S)

    def waits(self, number: int) -> Iterator[float]:
        """Yields the durations of the quiet tenant's successive requests."""
        for each in range(number):
            for _ in range(1 + each % 7):
                self.step()
            # It arrives while a step runs.
            name, came_s = f"quiet{each}", self.room.clock.now()
            self.step()
            tokens = prompt(10**6 + each, 25)
            self.room.add(name, tokens, max_tokens=4, job=of("quiet", is_owner=True))
            while name not in self.room.finished:
                self.step()
            yield self.room.clock.now() - came_s


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prompt_tokens", [20, 250, 900])
def test_a_flood_does_not_make_the_quiet_wait(policy: str, prompt_tokens: int) -> None:
    """Next to 150 requests of another tenant, its requests take at most twice their time alone, even if each
    arrives just after a step has begun."""
    alone = sorted(Traffic(policy, 0).waits(40))
    beside = sorted(list(Traffic(policy, 150, prompt_tokens).waits(60))[5:])
    assert beside[-1] <= 2.0 * alone[len(alone) // 2]


def test_the_flood_is_served_too() -> None:
    """Next to the quiet tenant, the flood gets at least a third of its throughput alone."""
    done = []
    for asks in (0, 60):
        traffic = Traffic("fcfs", 150)
        list(traffic.waits(asks))
        while traffic.room.clock.now() < 10.0:
            traffic.step()
        done.append(sum(name.startswith("flood") for name in traffic.room.finished) / 10.0)
    assert done[1] >= done[0] / 3


def test_what_a_step_costs_is_learned() -> None:
    """The cost is learned from steps of different lengths on a line, not from equal steps."""
    cost = StepCost()
    for number in range(40):
        tokens = 1 + number * 37 % 200
        cost.observe(tokens, 0.01 + 0.0002 * tokens)
    assert cost.tokens_of_an_empty_step == pytest.approx(50.0, rel=1e-6)

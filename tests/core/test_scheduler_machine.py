"""Whatever happens to a scheduler and its pins, nothing leaks, nothing is lost, and it always gets on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy
from engine.core.scheduler import PauseState
from engine.messages import JobFinished, ToolCall, ToolGapStarted
from engine.policy import FcfsPolicy, Pin, PinEnd, PolicyContext, PriorityPolicy, SchedulingPolicy
from engine.request import Request, RequestStatus
from tests.core.engine_room import EngineRoom

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 17, 64


class ChaosPolicy(PriorityPolicy):
    """Pins, breaks, refuses and expires at random, drawn from a stream of bits: the worst policy there can
    be."""

    lets_pass = True

    def __init__(self, bits: list[bool]) -> None:
        self._bits = iter(bits)
        self._ids = count()
        self._pins: dict[int, Pin] = {}

    def _coin(self) -> bool:
        return next(self._bits, False)

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        return not self._coin()

    def may_pass(self, request: Request, now: float) -> bool:
        return self._coin()

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        hashes = request.block_hashes[: request.num_computed_tokens // BLOCK_SIZE]
        if not hashes or self._coin():
            return None
        pin = Pin(next(self._ids), "job", request.request_id, hashes, now + 1)
        self._pins[pin.pin_id] = pin
        return pin

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        return [
            p for p in list(self._pins.values()) if p.block_hashes[0] in request.block_hashes and self._coin()
        ]

    def breakable(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        for pin in self._pins.values():
            if last_resort or self._coin():
                yield pin

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        for pin in list(self._pins.values()):
            if pin.deadline_s <= now and self._coin():
                yield pin, PinEnd.EXPIRED

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float) -> None:
        del self._pins[pin.pin_id]

    def on_pin_shrunk(self, pin: Pin, num_blocks_lost: int, now: float) -> None:
        assert pin is self._pins[pin.pin_id]

    def pins(self) -> Iterable[Pin]:
        return list(self._pins.values())


def make_policy(name: str, bits: list[bool]) -> SchedulingPolicy:
    context = PolicyContext(BLOCK_SIZE, NUM_BLOCKS - 1)
    if name == "chaos":
        return ChaosPolicy(bits)
    if name in ("median-horizon", "fixed", "fork", "paper"):
        return ContinuumPolicy(context, ContinuumConfig(ttl_rule=name, max_wait_s=1.0))
    return FcfsPolicy() if name == "fcfs" else PriorityPolicy()


class SchedulerMachine(RuleBasedStateMachine):
    """Jobs with turns, retries and branches, aborted, broken, paused and preempted in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = count()
        self.added: set[str] = set()
        self.jobs: dict[str, list[list[int]]] = {}

    @initialize(
        policy=st.sampled_from(
            ["chaos", "chaos", "median-horizon", "fixed", "fork", "paper", "fcfs", "priority"]
        ),
        bits=st.lists(st.booleans(), min_size=0, max_size=60),
        reserve=st.booleans(),
        threshold=st.sampled_from([0, 0, 5]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, policy: str, bits: list[bool], reserve: bool, threshold: int, caching: bool) -> None:
        self.room = EngineRoom(
            make_policy(policy, bits),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_LEN,
            enable_prefix_caching=caching,
            scheduler_reserve_full_isl=reserve,
            long_prefill_token_threshold=threshold,
        )

    def _add(self, prompt: list[int], job: str | None, **options: Any) -> None:
        request_id = f"r{next(self.ids)}"
        self.added.add(request_id)
        self.room.add(request_id, prompt[: MAX_LEN - 8], job_id=job, **options)
        if job is not None:
            self.jobs.setdefault(job, []).append(self.room.tokens[request_id])

    @rule(
        length=st.integers(1, 40),
        start=st.integers(0, 3),
        job=st.sampled_from([None, "a", "b", "c"]),
        max_tokens=st.integers(1, 8),
        priority=st.integers(0, 2),
    )
    def new_turn(self, length: int, start: int, job: str | None, max_tokens: int, priority: int) -> None:
        """A first turn; prompts share prefixes."""
        prompt = [start] * 8 + list(range(length))
        self._add(prompt, job, max_tokens=max_tokens, priority=priority)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), more=st.integers(0, 10), last=st.booleans())
    def next_turn(self, data: st.DataObject, more: int, last: bool) -> None:
        """Any earlier turn of a job continued, from wherever it stands: a return, a branch, a retry or an
        overlap."""
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        history = data.draw(st.sampled_from(self.jobs[job]))
        self._add(list(history) + list(range(more)), job, max_tokens=4, is_last_step=last)

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0, 20.0]))
    def step(self, seconds: float) -> None:
        self.room.step(seconds)

    @rule(seconds=st.sampled_from([0.1, 1.0, 15.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.room.clock.advance(seconds)
        self.room.scheduler.expire(self.room.clock.now())

    @precondition(lambda self: self.room.scheduler.requests)
    @rule(data=st.data(), stopped=st.booleans())
    def end_early(self, data: st.DataObject, stopped: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.room.scheduler.requests)))
        status = RequestStatus.FINISHED_STOPPED if stopped else RequestStatus.FINISHED_ABORTED
        now = self.room.clock.now()
        outputs = self.room.scheduler.finish_requests([request_id, "never seen"], status, now)
        assert [output.request_id for output in outputs] == [request_id]
        self.room.finished[request_id] = outputs[0]

    @rule(data=st.data(), command=st.sampled_from(["pytest -q", "cd x && ls", ""]))
    def tools_start(self, data: st.DataObject, command: str) -> None:
        if self.added:
            request_id = data.draw(st.sampled_from(sorted(self.added)))
            calls = [ToolCall("bash", f'{{"command": "{command}"}}')] if command else []
            self.room.scheduler.signal(ToolGapStarted("a", request_id, calls), self.room.clock.now())

    @rule(job=st.sampled_from(["a", "b", "never seen"]))
    def finish_job(self, job: str) -> None:
        self.room.scheduler.signal(JobFinished(job), self.room.clock.now())

    @rule(state=st.sampled_from(list(PauseState)))
    def pause(self, state: PauseState) -> None:
        self.room.scheduler.set_pause_state(state)

    @rule()
    def reset_prefix_cache(self) -> None:
        busy = bool(self.room.scheduler.running)
        assert self.room.scheduler.reset_prefix_cache(self.room.clock.now()) is not busy
        assert self.room.scheduler.statistics().num_pins == 0

    @invariant()
    def all_is_accounted_for(self) -> None:
        if hasattr(self, "room"):
            self.room.scheduler.check_invariants()
            assert set(self.room.scheduler.requests) | set(self.room.finished) == self.added
            assert not set(self.room.scheduler.requests) & set(self.room.finished)

    def teardown(self) -> None:
        """From any state the engine runs dry, and when pins have run out every block is back."""
        if not hasattr(self, "room"):
            return
        room = self.room
        room.scheduler.set_pause_state(PauseState.UNPAUSED)
        room.run()
        assert set(room.finished) == self.added
        room.scheduler.check_invariants()
        assert room.scheduler.reset_prefix_cache(room.clock.now())
        assert room.scheduler.kv.num_free_blocks == NUM_BLOCKS - 1


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

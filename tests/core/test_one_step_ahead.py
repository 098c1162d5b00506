"""An engine core whose executor takes two plans: the device never waits for the host, and outputs do not
change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from engine.clock import ManualClock
from engine.config.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.policy import fcfs
from engine.core.request import RequestStatus
from engine.core_process.engine_core import EngineCore
from engine.errors import EngineError
from engine.executor import Executor, FinishedOutput, PendingOutput
from engine.frontend.llm import engine_config
from engine.records.messages import AbortRequest, EngineCoreOutput, EngineCoreRequest, FinishReason
from engine.records.sampling_params import SamplingParams
from engine.testing import FakeExecutor, FakeExecutorFactory, fake_token
from tests.core.engine_room import CountingGrammar, EngineRoom, token_at
from tests.core.test_scheduler_machine import ChaosPolicy

STEP_S = 0.010


class TimedDevice:
    """Runs steps one after another, each for ``STEP_S`` of a manual clock: a step begins once it is submitted
    and the previous one has ended."""

    def __init__(self, executor: FakeExecutor, clock: ManualClock) -> None:
        self.info = executor.info
        self.max_concurrent_batches = executor.max_concurrent_batches
        self.events: list[str] = []
        self.idle_s: list[float] = []
        """The idle times between consecutive steps."""
        self._executor = executor
        self._clock = clock
        self._free_at_s: float | None = None
        self._number = itertools.count()

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        number, now = next(self._number), self._clock.now()
        self.events.append(f"submit {number}")
        free_at_s = now if self._free_at_s is None else self._free_at_s
        self.idle_s.append(max(0.0, now - free_at_s))
        self._free_at_s = max(now, free_at_s) + STEP_S
        return _TimedStep(self, number, self._free_at_s, self._executor.submit(plan))

    def end(self, number: int, ends_s: float) -> None:
        self._clock.advance(max(0.0, ends_s - self._clock.now()))
        self.events.append(f"output {number}")

    def on_failure(self, told: Callable[[EngineError], None]) -> None:
        self._executor.on_failure(told)

    def on_wave(self, told: Callable[[int], None]) -> None:
        self._executor.on_wave(told)

    def call_worker(self, method: str, *args: object) -> None:
        self._executor.call_worker(method, *args)

    def shutdown(self) -> None:
        self._executor.shutdown()


@dataclass(frozen=True, slots=True)
class _TimedStep:
    device: TimedDevice
    number: int
    ends_s: float
    pending: PendingOutput

    def result(self) -> ModelRunnerOutput:
        self.device.end(self.number, self.ends_s)
        return self.pending.result()


class Room:
    """A core and its device on one clock, where planning a step takes the host ``host_s``."""

    def __init__(self, *, host_s: float = 0.0, **options: object) -> None:
        self.clock = ManualClock()
        self.host_s = host_s
        config = engine_config("fake", **{"async_scheduling": True} | options)
        self.core = EngineCore(config, self._make, fcfs, self.clock)
        schedule = self.core.scheduler.schedule

        def slow_schedule(now: float) -> SchedulerOutput:
            plan = schedule(now)
            self.clock.advance(self.host_s)
            return plan

        self.core.scheduler.schedule = slow_schedule  # type: ignore[method-assign]
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def _make(self, config: EngineConfig) -> Executor:
        self.device = TimedDevice(FakeExecutorFactory()(config), self.clock)
        return self.device

    def add(self, request_id: str, num_tokens: int = 5, **params: object) -> None:
        wanted = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
        assert not self.core.add_request(EngineCoreRequest(request_id, [1, 2, 3], wanted, self.clock.now()))

    def step(self) -> None:
        message = self.core.step()
        for output in message.outputs if message is not None else []:
            self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        while self.core.scheduler.has_unfinished_requests() and not (until is not None and until()):
            self.step()

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.new_token_ids]


def expected(request_id: str, num_tokens: int) -> list[int]:
    return [fake_token(request_id, position, 512) for position in range(num_tokens)]


# ---- idle time ----


def test_the_next_step_is_submitted_before_the_output_of_the_one_before_is_waited_for() -> None:
    room = Room()
    room.add("a-0", num_tokens=4)
    room.run()
    assert room.device.events[:6] == [
        *("submit 0", "submit 1", "output 0"),
        *("submit 2", "output 1"),
        "submit 3",
    ]
    assert room.tokens("a-0") == expected("a-0", 4)


def test_the_device_is_never_idle_while_the_host_is_faster() -> None:
    """64 requests decode 200 steps; planning one takes 9 of the 10 ms that the device needs for it."""
    room = Room(host_s=0.009, max_num_seqs=64)
    for number in range(64):
        room.add(f"r{number}-0", num_tokens=200)
    room.run()
    assert room.device.idle_s[1:200] == [0.0] * 199
    assert all(room.tokens(f"r{number}-0") == expected(f"r{number}-0", 200) for number in range(64))


def test_without_it_the_device_waits_for_every_plan() -> None:
    """A control for the test above: without async scheduling the device is idle for each plan."""
    room = Room(host_s=0.009, async_scheduling=False)
    room.add("a-0", num_tokens=50)
    room.run()
    assert room.device.idle_s[1:50] == pytest.approx([0.009] * 49)


def test_no_step_is_run_for_tokens_that_cannot_be() -> None:
    """The step of the last token under ``max_tokens`` is followed by no other step."""
    room = Room()
    room.add("a-0", num_tokens=5)
    room.run()
    assert len([event for event in room.device.events if event.startswith("submit")]) == 5
    room = Room(max_model_len=8)
    room.add("b-0", num_tokens=100)
    room.run()
    assert room.tokens("b-0") == expected("b-0", 5)
    assert len([event for event in room.device.events if event.startswith("submit")]) == 5


# ---- stops are noticed one step late ----


def test_nothing_of_the_token_after_a_stop_is_seen() -> None:
    """The step after a stop was submitted; its token is dropped and its blocks are freed when it ends."""
    room = Room()
    stop = fake_token("a-0", 2, 512)
    room.add("a-0", num_tokens=50, stop_token_ids=[stop])
    room.run()
    last = room.outputs["a-0"][-1]
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, stop)
    assert room.tokens("a-0") == expected("a-0", 3)
    assert room.core.is_draining
    assert room.core.utilities.statistics().num_free_blocks < room.core.utilities.statistics().num_blocks
    room.core.utilities.check_invariants()
    assert room.core.wait_for_work()
    assert room.core.step() is not None
    assert room.core.utilities.statistics().num_free_blocks == room.core.utilities.statistics().num_blocks
    assert not room.core.is_draining


def test_prefixes_can_be_forgotten_while_a_step_runs_for_nobody() -> None:
    room = Room()
    room.add("a-0", num_tokens=50)
    room.run(until=lambda: len(room.outputs.get("a-0", [])) == 30)
    assert not room.core.utilities.reset_prefix_cache()
    room.core.abort_requests(AbortRequest(["a-0"]))
    assert room.core.utilities.reset_prefix_cache()
    room.core.utilities.check_invariants()
    room.step()
    room.step()
    statistics = room.core.utilities.statistics()
    assert (statistics.num_cached_blocks, statistics.num_free_blocks) == (0, statistics.num_blocks)


def test_an_id_that_is_used_again_gets_nothing_of_the_old_request() -> None:
    """The old request was aborted with two steps under way that sample its tokens."""
    room = EngineRoom(async_scheduling=True)
    room.add("a", [1] * 5, max_tokens=20)
    for _ in range(3):
        room.step()
    room.plan_next()
    (output,) = room.scheduler.finish_requests(["a"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    assert output.finish_reason is FinishReason.ABORT
    del room.received["a"]
    room.add("a", [2] * 9, max_tokens=3)
    room.take_output()
    assert "a" not in room.received
    room.run()
    assert room.received["a"] == [token_at("a", position) for position in (9, 10, 11)]


def test_a_preempted_request_gets_the_token_that_was_under_way() -> None:
    """The token arrives, also if it ends the request while that waits to run again."""
    room = EngineRoom(async_scheduling=True, num_blocks=8)
    room.add("old", [1] * 11, max_tokens=14)
    room.add("new", [2] * 11, max_tokens=20, stops_after=4)
    preempted = False
    while "new" not in room.finished or "old" not in room.finished:
        plan = room.step()
        room.check_invariants()
        preempted = preempted or "new" in plan.preempted_req_ids
    assert preempted
    assert room.received["new"] == [token_at("new", position) for position in range(11, 16)]
    assert room.received["old"] == [token_at("old", position) for position in range(11, 25)]


@pytest.mark.parametrize("num_tokens", range(5, 13))
def test_a_turn_that_is_ended_keeps_what_is_known_of_it(num_tokens: int) -> None:
    """A turn ended with two steps under way is pinned with the full blocks of its known tokens, wherever in a
    block it ends."""
    policy = ChaosPolicy([])
    room = EngineRoom(policy, async_scheduling=True)
    room.add("a", [1] * num_tokens, max_tokens=20)
    room.step()
    room.plan_next()
    room.scheduler.finish_requests(["a"], RequestStatus.FINISHED_STOPPED, room.clock.now())
    room.check_invariants()
    assert [pin.num_blocks for pin in policy.pins()] == [(num_tokens + 1) // 4]
    room.run()
    room.check_invariants()


def test_blocks_of_an_aborted_request_are_not_handed_on_under_a_running_step() -> None:
    """A new request that needs these blocks waits for the step; no other request loses a block."""
    room = EngineRoom(async_scheduling=True, num_blocks=9, max_num_batched_tokens=64)
    room.add("gone", [1] * 28, max_tokens=4)
    room.plan_next()
    room.scheduler.finish_requests(["gone"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    room.add("next", [2] * 28, max_tokens=2)
    assert not room.plan_next().num_scheduled_tokens
    room.take_output()
    assert room.plan_next().num_scheduled_tokens == {"next": 28}
    room.run()
    assert len(room.received["next"]) == 2


@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_blocks_that_were_freed_at_once_would_be_found_out(num_host_blocks: int) -> None:
    """The test memory detects blocks freed too early, whether the new request computes or loads."""
    room = EngineRoom(
        async_scheduling=True, num_blocks=9, max_num_batched_tokens=64, num_host_blocks=num_host_blocks
    )
    room.add("warm", [2] * 28, max_tokens=2)
    room.run()
    room.add("gone", [1] * 28, max_tokens=4)
    room.plan_next()
    room.scheduler.kv.defer_free = lambda step_id, request: None  # type: ignore[method-assign]
    room.scheduler.finish_requests(["gone"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    room.add("next", [2] * 28, max_tokens=2)
    what = "a load" if num_host_blocks else "a step"
    with pytest.raises(AssertionError, match=f"{what} would write what"):
        room.plan_next()


def test_what_a_prefill_takes_is_without_the_wait_for_the_step_before() -> None:
    """The policy learns the cost of a prefill from this time."""
    room = EngineRoom(async_scheduling=True)
    room.add("first", [1] * 5)
    room.plan_next()
    second = room.add("second", [2] * 5)
    room.plan_next()
    room.take_output(seconds=3.0)
    room.take_output(seconds=1.0)
    assert second.first_scheduled_time == second.arrival_time + 3.0
    assert second.first_token_time == second.first_scheduled_time + 1.0


def test_nobody_loses_blocks_for_what_a_running_step_gives_back() -> None:
    """A request short of a block sits out one plan; nothing is preempted, and no pin is broken."""
    room = EngineRoom(async_scheduling=True, num_blocks=9)
    room.add("stays", [1] * 15, max_tokens=8)
    room.add("gone", [2] * 15, max_tokens=8)
    room.plan_next()
    room.step()
    room.scheduler.finish_requests(["gone"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    plan = room.plan_next()
    assert (plan.num_scheduled_tokens, plan.preempted_req_ids) == ({}, set())
    room.take_output()
    assert room.plan_next().num_scheduled_tokens == {"stays": 1}
    room.run()
    assert len(room.received["stays"]) == 8
    assert room.scheduler.make_stats().num_preemptions == 0


# ---- grammars, stores, errors ----


def test_masks_are_of_grammars_that_have_followed_all_tokens_before() -> None:
    """A plan is made before its grammar knows the token under way; ended requests need no mask."""
    room = EngineRoom(async_scheduling=True)
    request = room.add("a", [1] * 5, max_tokens=20, awaits_grammar=True)
    grammar = CountingGrammar(2)
    room.scheduler.grammar_compiled(request, grammar, room.clock.now())
    plans = [room.plan_next(), room.plan_next()]
    assert [room.scheduler.sampled_grammars(plan) for plan in plans] == [{"a": grammar}] * 2
    assert grammar.num_accepted == 0
    room.take_output()
    assert grammar.num_accepted == 1
    third = room.plan_next()
    assert room.scheduler.sampled_grammars(plans[1]) == {"a": grammar}
    room.take_output()
    assert grammar.complete
    assert room.scheduler.sampled_grammars(third) == {}
    assert len(room.received["a"]) == 2


def test_a_block_is_offered_to_the_other_tier_once_its_last_token_is_known() -> None:
    """A block is stored by the plan after its last token is known; at the end all full blocks have copies."""
    room = EngineRoom(async_scheduling=True, num_host_blocks=20)
    room.add("a", [1] * 6, max_tokens=12)
    room.run()
    assert room.scheduler.statistics().num_used_host_blocks == 4
    room.check_invariants()


def test_an_error_in_a_step_ends_the_core_with_another_under_way() -> None:
    config = engine_config("fake", async_scheduling=True)
    core = EngineCore(config, FakeExecutorFactory(raise_at_step=3), fcfs, ManualClock())
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    core.add_request(EngineCoreRequest("a-0", [1, 2], params, 0.0))
    for _ in range(2):
        assert core.wait_for_work()
        assert core.step() is not None
    with pytest.raises(RuntimeError, match="told to fail"):
        core.step()
    core.close()


def test_a_step_that_returns_at_once_is_no_step_ahead() -> None:
    """Executors that take one plan at a time return a finished output."""
    executor = FakeExecutorFactory()(engine_config("fake"))
    assert executor.max_concurrent_batches == 1
    plan = EngineRoom().plan_next()
    assert isinstance(executor.submit(plan), FinishedOutput)

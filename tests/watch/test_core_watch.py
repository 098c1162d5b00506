"""Promises to viewers of a core: all events arrive in order, and without viewers no events are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy
from engine.clock import ManualClock
from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig, TraceConfig
from engine.core.policy import FcfsPolicy, PolicyContext, SchedulingPolicy
from engine.core_process.engine_core import EngineCore
from engine.records.messages import EngineCoreRequest, JobFinished, JobRef, ToolCall, ToolGapStarted
from engine.records.sampling_params import SamplingParams
from engine.testing import FakeExecutorFactory
from engine.watch.digest import MAX_EVENTS, Digest
from engine.watch.feed import CAPACITY, LEASE_S
from engine.watch.view import Phase, View
from tracing.events import PrefixCacheEvent, RequestArrived, StepDecision, StepOutput
from tracing.reader import read_trace
from tracing.tracer import Tracer

BLOCK = 16
NUM_BLOCKS = 64
STEP_S = 0.1


@dataclass(slots=True)
class Room:
    """A core on a manual clock."""

    core: EngineCore
    tracer: Tracer
    clock: ManualClock = field(default_factory=ManualClock)

    def notes(self) -> bool:
        """Whether events are made."""
        return self.tracer.on

    def look(self, viewer: str = "a", *, scene: bool = False) -> View:
        return msgspec.json.decode(self.core.call_utility("watch", [viewer, scene]), type=View)

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 3, job: JobRef | None = None) -> None:
        message = EngineCoreRequest(
            request_id, prompt, SamplingParams(max_tokens=max_tokens), self.clock.now(), job=job
        )
        assert self.core.add_request(message) == []

    def step(self, step_s: float = STEP_S) -> None:
        self.clock.advance(step_s)
        self.core.step()

    def run(self, request_id: str, prompt: list[int], job: str | None = None, step_s: float = STEP_S) -> None:
        """Runs a request from beginning to end."""
        self.add(request_id, prompt, job=JobRef(job) if job else None)
        while self.core.scheduler.requests:
            self.step(step_s)


Make = Callable[..., Room]


@pytest.fixture
def make_room() -> Iterator[Make]:
    cores: list[EngineCore] = []

    def make(policy: str = "continuum", trace: Path | None = None, num_blocks: int = NUM_BLOCKS) -> Room:
        contexts: list[PolicyContext] = []

        def make_policy(context: PolicyContext) -> SchedulingPolicy:
            contexts.append(context)
            return FcfsPolicy() if policy == "fcfs" else ContinuumPolicy(context, ContinuumConfig())

        config = EngineConfig(
            model=ModelConfig(model="fake"),
            cache=CacheConfig(block_size=BLOCK, num_gpu_blocks_override=num_blocks + 1),
            trace=TraceConfig(trace_path=None if trace is None else str(trace)),
        )
        clock = ManualClock()
        core = EngineCore(config, FakeExecutorFactory(), make_policy, clock)
        cores.append(core)
        tracer = contexts[0].tracer
        assert tracer is not None
        return Room(core, tracer, clock)

    yield make
    for core in cores:
        core.close()


@pytest.fixture(params=["continuum", "fcfs"])
def room(request: pytest.FixtureRequest, make_room: Make) -> Room:
    return make_room(request.param)


def test_nothing_is_noted_while_nobody_looks(room: Room) -> None:
    """Events are made only from a viewer's first look to its last."""
    assert not room.notes()
    room.look()
    assert room.notes()
    room.core.call_utility("unwatch", ["a"])
    assert not room.notes()
    room.core.call_utility("unwatch", ["a"])  # repeating it is no fault


def test_a_viewer_that_has_gone_silently_is_forgotten(room: Room) -> None:
    """An API server that was killed cannot unsubscribe: its lease ends with the next event after it."""
    room.look("killed")
    room.clock.advance(LEASE_S + 0.1)
    room.run("late-1", [1] * 20)
    assert not room.notes()


def test_a_viewer_that_looks_keeps_its_lease(room: Room) -> None:
    """A viewer that keeps looking keeps its lease; another one that stopped does not end it."""
    room.look()
    room.look("gone")
    for number in range(5):
        room.clock.advance(LEASE_S * 0.6)
        room.run(f"r-{number}", [number] * 20)
        assert room.look().totals.generated_tokens == 3
    assert room.notes()


def test_a_request_is_told_from_its_arrival_to_its_end(room: Room) -> None:
    """Each phase comes once, in order, with its start time; then its cost is in the totals."""
    room.look()
    arrived_s = room.clock.now()
    room.run("r-1", [7] * 40)
    view = room.look()
    assert [change.phase for change in view.phases] == [Phase.QUEUE, Phase.PREFILL, Phase.DECODE, None]
    assert {change.req_id for change in view.phases} == {"r-1"}
    times_s = [change.at_s for change in view.phases]
    assert times_s == [arrived_s, *(pytest.approx(arrived_s + STEP_S * n) for n in (1, 1, 3))]
    assert view.totals.prefill_tokens == view.totals.prompt_tokens == 40
    assert view.totals.generated_tokens == view.totals.output_steps == 3
    assert view.totals.hit_tokens == 0
    assert view.totals.elapsed_s == pytest.approx(3 * STEP_S)
    assert room.look().phases == []


def test_accepted_drafts_are_tokens_without_a_step() -> None:
    """Two of three drafts are right, next to a request without drafts."""
    digest = Digest()
    digest.take(
        [
            PrefixCacheEvent(
                step=0,
                now=1.0,
                req_id=req_id,
                job_id=None,
                hit_tokens=0,
                num_prompt_tokens=8,
                num_tokens=8,
                resumed=False,
            )
            for req_id in ("a", "b")
        ]
    )
    decision = StepDecision(
        step=1,
        now=1.0,
        new=[],
        resumed=[],
        running=["a", "b"],
        preempted=[],
        tokens={"a": 4, "b": 1},
        drafts={"a": 3},
        total_tokens=5,
        free_blocks=9,
    )
    digest.take([decision, StepOutput(step=1, now=2.0, num_tokens={"a": 3})])
    assert (digest.totals.generated_tokens, digest.totals.output_steps) == (4, 2)


def test_what_was_under_way_is_in_the_first_scene(room: Room) -> None:
    """A late viewer sees the open requests with their times, and then how they go on."""
    room.add("old-1", [5] * 40)
    room.step()
    scene = room.look(scene=True).scene
    assert scene is not None
    (request,) = scene.requests
    assert (request.req_id, request.phase, request.num_output_tokens) == ("old-1", Phase.DECODE, 1)
    assert request.started_s == request.first_token_s == pytest.approx(STEP_S)
    room.step()
    room.step()
    assert [change.phase for change in room.look().phases] == [None]


def test_a_preempted_request_waits_for_memory(make_room: Make) -> None:
    """The request's phases show the wait for memory and its end; its tokens count once."""
    room = make_room("fcfs", num_blocks=8)
    room.look()
    room.add("first-1", [1] * 60, max_tokens=20)
    room.add("second-1", [2] * 60, max_tokens=20)
    while room.core.scheduler.requests:
        room.step()
    view = room.look()
    assert view.totals.preemptions == 1
    phases = [change.phase for change in view.phases if change.req_id == "second-1"]
    assert phases == [
        Phase.QUEUE,
        Phase.PREFILL,
        Phase.DECODE,
        Phase.MEMORY,
        Phase.PREFILL,
        Phase.DECODE,
        None,
    ]
    assert view.totals.generated_tokens == 40


def test_a_job_is_told_with_its_pins(make_room: Make) -> None:
    """Phases name their job; the scene has its pin with blocks and deadline, and its expected tools."""
    room = make_room()
    room.look()
    room.run("t1-11111111", [3] * 64, job="job")
    room.core.signal(ToolGapStarted("t1-11111111", [ToolCall("bash", '{"command": "ls"}')]))
    view = room.look(scene=True)
    assert {change.job_id for change in view.phases} == {"job"}
    assert [event.kind for event in view.events][-1] == "decided"
    scene = view.scene
    assert scene is not None
    (pin,) = scene.pins
    assert (pin.job_id, pin.num_blocks) == ("job", 4)
    assert pin.deadline_s > view.now
    (job,) = scene.jobs
    assert job.branches[0].tools == ["bash/ls"]
    assert scene.policy == "continuum"


def test_a_job_alone_tells_of_its_turns(make_room: Make) -> None:
    """Past turns have times and receipts, also if they ended before any look, or in a finished job."""
    room = make_room()
    room.run("t1-11111111", [3] * 64, job="job")
    room.core.signal(ToolGapStarted("t1-11111111", [ToolCall("bash", '{"command": "ls"}')]))
    room.run("other-1", [9] * 64, job="other")
    room.clock.advance(0.3)
    room.run("t2-11111111", [3] * 80, job="job")
    first, second = room.core.utilities.past_turns("job")
    assert (first.turn, second.turn) == (1, 2)
    assert first.tools == ["bash/ls"]
    assert second.tools is None
    assert second.cached_tokens == 64
    assert second.previous_pin == "handed_over"
    assert first.queue_s == pytest.approx(STEP_S)
    assert first.decode_s == pytest.approx(2 * STEP_S)
    assert second.gap_s == pytest.approx(3 * STEP_S + 0.3)
    room.core.signal(JobFinished("job"))
    assert room.core.utilities.job("job") is None
    assert [turn.turn for turn in room.core.utilities.past_turns("job")] == [1, 2]


def test_each_viewer_is_told_everything(room: Room) -> None:
    """Two viewers that look at different times both get all events."""
    room.look("a")
    room.look("b")
    room.run("r-1", [7] * 40)
    first = room.look("a").phases
    room.run("r-2", [8] * 40)
    assert room.look("b").phases == first + room.look("a").phases


def test_a_trace_and_a_viewer_get_the_same(make_room: Make, tmp_path: Path) -> None:
    """A viewer removes nothing from the trace file, and does not end it by leaving."""
    path = tmp_path / "trace.jsonl"
    room = make_room(trace=path)
    room.run("before-1", [1] * 40, job="job")
    room.look()
    room.run("during-1", [1] * 60, job="job")
    told = room.look().events
    room.core.call_utility("unwatch", ["a"])
    room.run("after-1", [1] * 80, job="job")
    room.core.close()
    written = list(read_trace(path))
    assert told
    assert [event for event in written if event in told] == told
    arrived = [event.req_id for event in written if isinstance(event, RequestArrived)]
    assert arrived == ["before-1", "during-1", "after-1"]


def test_what_is_too_much_is_left_out_and_counted(make_room: Make) -> None:
    """A viewer that does not look for a while costs bounded memory; the next scene is complete."""
    room = make_room(num_blocks=256)
    room.look()
    room.add("long-1", [1] * 20, max_tokens=3 * CAPACITY // 4)
    while room.core.scheduler.requests:
        room.step(0.001)
    room.add("open-1", [2] * 20)
    view = room.look(scene=True)
    assert view.num_left_out >= CAPACITY // 4
    assert view.scene is not None
    assert [request.req_id for request in view.scene.requests] == ["open-1"]
    assert view.totals.steps < CAPACITY


def test_of_many_decisions_the_newest_are_told(make_room: Make) -> None:
    """A view has the newest events and counts those that it omits."""
    room = make_room()
    room.look()
    for number in range(MAX_EVENTS // 3):
        room.run(f"turn{number}-1", [number] * 20, job=f"job {number}", step_s=0.001)
    view = room.look()
    assert len(view.events) == MAX_EVENTS
    assert view.num_left_out > 0
    assert view.events[-1].job_id == f"job {MAX_EVENTS // 3 - 1}"

"""With a host tier, new jobs wait where those that have begun will need all that can be kept."""

from __future__ import annotations

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy
from engine.messages import ToolCall, ToolGapStarted
from engine.policy import PolicyContext
from tests.core.engine_room import EngineRoom
from tracing.events import JobEvent, TraceEvent
from tracing.tracer import Tracer

BLOCK = 4
HOST_BLOCKS = 40
"""Of which 36 may be needed."""
MAX_WAIT_S = 50.0


class Room(EngineRoom):
    """A pool of 32 blocks, 40 copies beside it; tools that were never seen are as likely back as not."""

    def __init__(self, num_host_blocks: int = HOST_BLOCKS) -> None:
        tracer = Tracer()
        context = PolicyContext(BLOCK, 32, tracer, num_host_blocks=num_host_blocks)
        self.events: list[TraceEvent] = []
        tracer.add(self)
        super().__init__(
            ContinuumPolicy(context, ContinuumConfig(max_wait_s=MAX_WAIT_S)),
            block_size=BLOCK,
            num_blocks=33,
            max_model_len=96,
            num_host_blocks=num_host_blocks,
            tracer=tracer,
        )

    def emit(self, event: TraceEvent) -> None:
        self.events.append(event)

    def parked(self) -> list[str | None]:
        return [e.req_id for e in self.events if isinstance(e, JobEvent) and e.kind == "turn_parked"]

    def begin(self, job_id: str, num_blocks: int, *commands: str) -> None:
        """A job's first turn from its arrival to its end; then it calls these."""
        self.add(job_id, [hash(job_id) % 900 + 100] * (num_blocks * BLOCK), job_id=job_id, max_tokens=1)
        while job_id not in self.finished:
            self.step()
        calls = [ToolCall("bash", f'{{"command": "{command}"}}') for command in commands]
        self.scheduler.signal(ToolGapStarted(job_id, calls), self.clock.now())

    def learn(self, command: str, gap_s: float) -> None:
        """Calls that took so long."""
        for number in range(12):
            job_id = f"{command}-{number}"
            self.begin(job_id, 1, command)
            self.clock.advance(gap_s)
            again = [*self.tokens[job_id], 7]
            self.add(f"{job_id}-2", again, job_id=job_id, is_last_step=True, max_tokens=1)
            while f"{job_id}-2" not in self.finished:
                self.step()

    def is_started(self, request_id: str) -> bool:
        return request_id in self.finished or request_id not in {r.request_id for r in self.scheduler.waiting}


def crowded(num_host_blocks: int = HOST_BLOCKS) -> Room:
    """One turn runs for long, two jobs of 14 blocks are about to be back, and a new one of 12 has come."""
    room = Room(num_host_blocks)
    room.learn("ls", 5.0)
    room.add("runs", [50] * 4, max_tokens=80)
    for job_id in ("one", "two"):
        room.begin(job_id, 14, "ls")
    room.add("new", [60] * (12 * BLOCK), job_id="new", max_tokens=1)
    return room


def test_a_new_job_waits_for_room_beside_those_that_will_be_back() -> None:
    """The trace says so once. When one of them has finished it begins."""
    room = crowded()
    for _ in range(3):
        room.step()
    assert not room.is_started("new")
    assert room.parked() == ["new"]
    room.add("one-2", [*room.tokens["one"], 7], job_id="one", is_last_step=True, max_tokens=1)
    for _ in range(4):
        room.step()
    assert "one-2" in room.finished
    assert room.is_started("new")


def test_without_a_host_tier_nothing_but_pins_keeps_a_job_from_beginning() -> None:
    """There is room for it as soon as the pins have run out, whoever may be back."""
    room = crowded(num_host_blocks=0)
    room.clock.advance(20.0)
    room.step()
    assert room.is_started("new")
    assert not room.parked()


def test_whose_calls_take_for_ever_keeps_nobody_out() -> None:
    """Large contexts of calls that are not back in ten minutes leave room."""
    room = Room()
    room.learn("sleep", 3000.0)
    room.add("runs", [50] * 4, max_tokens=80)
    for job_id in ("one", "two"):
        room.begin(job_id, 14, "sleep 9")
    room.add("new", [60] * (12 * BLOCK), job_id="new", max_tokens=1)
    room.clock.advance(30.0)
    room.step()
    assert room.is_started("new")


def test_a_parked_job_waits_no_longer_than_its_bound_and_stands_in_nobodys_way() -> None:
    """A question that comes later is answered at once, a job that comes later lines up behind; and what the
    others may need counts no more once it has waited for ``max_wait_s``."""
    room = crowded()
    room.step()
    room.add("later", [61] * BLOCK, job_id="later", max_tokens=1)
    room.add("question", [62] * BLOCK, max_tokens=1)
    for _ in range(3):
        room.step()
    assert "question" in room.finished
    assert not room.is_started("new")
    assert not room.is_started("later")
    room.clock.advance(MAX_WAIT_S)
    for _ in range(4):
        room.step()
    assert room.is_started("new")
    assert room.is_started("later")


def test_the_only_job_may_always_begin() -> None:
    """Whatever the others may need: nothing else could run."""
    room = crowded()
    room.step()
    while "runs" not in room.finished:
        room.step()
    for _ in range(2):
        room.step()
    assert room.is_started("new")

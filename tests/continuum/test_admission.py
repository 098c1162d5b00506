"""New jobs wait if the jobs that have begun will need all memory that can be kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy
from engine.core.policy import PolicyContext
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from engine.records.messages import JobRef, ToolCall, ToolGapStarted
from tests.core.engine_room import EngineRoom
from tracing.events import JobEvent, TraceEvent
from tracing.tracer import Tracer

BLOCK = 4
POOL_BLOCKS = 32
"""Blocks of the pool; without a host tier all of them may be needed."""
HOST_BLOCKS = 40
"""Blocks of the host tier, of which 32 may be needed."""
MAX_WAIT_S = 50.0
CONFIG = ContinuumConfig(max_wait_s=MAX_WAIT_S)
HOLD_BRIEFLY = replace(CONFIG, ttl_rule="fixed", fixed_ttl_s=2.0)


class Room(EngineRoom):
    """A pool with or without a host tier; a tool never seen is as likely to return as not."""

    def __init__(
        self, num_host_blocks: int = HOST_BLOCKS, config: ContinuumConfig = CONFIG, num_states: int = 0
    ) -> None:
        tracer = Tracer()
        groups = (*ONE_FULL_GROUP, KVCacheGroup((0,), state_blocks=10))[: 2 if num_states else 1]
        context = PolicyContext(
            BLOCK,
            POOL_BLOCKS,
            tracer,
            num_host_blocks=num_host_blocks,
            kv_cache_groups=groups,
            num_states=max(0, num_states - 1),
        )
        self.events: list[TraceEvent] = []
        self.begun: dict[str, int] = {}
        """The token that a job's prompt repeats: no two begin alike by chance."""
        tracer.add(self)
        super().__init__(
            ContinuumPolicy(context, config),
            block_size=BLOCK,
            num_blocks=POOL_BLOCKS + 1,
            max_model_len=96,
            num_host_blocks=num_host_blocks,
            kv_cache_groups=groups,
            num_states=num_states,
            tracer=tracer,
        )

    def emit(self, event: TraceEvent) -> None:
        self.events.append(event)

    def parked(self) -> list[str | None]:
        return [event.req_id for event in self.parkings()]

    def parkings(self) -> list[JobEvent]:
        return [e for e in self.events if isinstance(e, JobEvent) and e.kind == "turn_parked"]

    def begin(self, job_id: str, num_blocks: int, *commands: str, num_shared: int = 0) -> None:
        """Runs a job's first turn, which then calls ``commands``. ``num_shared`` of its blocks are common to
        all jobs."""
        prompt = [
            *[1] * (num_shared * BLOCK),
            *[self.begun.setdefault(job_id, 100 + len(self.begun))] * ((num_blocks - num_shared) * BLOCK),
        ]
        self.add(job_id, prompt, job_id=job_id, max_tokens=1)
        while job_id not in self.finished:
            self.step()
        calls = [ToolCall("bash", f'{{"command": "{command}"}}') for command in commands]
        self.scheduler.signal(ToolGapStarted(job_id, calls), self.clock.now())

    def learn(self, command: str, gap_s: float) -> None:
        """Teaches that calls of this command take ``gap_s``."""
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


def crowded(
    num_host_blocks: int = HOST_BLOCKS,
    config: ContinuumConfig = CONFIG,
    *,
    num_blocks: int = 14,
    num_shared: int = 0,
    num_states: int = 0,
) -> Room:
    """One turn runs for long, two jobs of ``num_blocks`` each will soon return, and a new one as large has
    arrived."""
    room = Room(num_host_blocks, config, num_states)
    room.learn("ls", 5.0)
    room.add("runs", [50] * 4, max_tokens=80)
    for job_id in ("one", "two"):
        room.begin(job_id, num_blocks, "ls", num_shared=num_shared)
    prompt = [*[1] * (num_shared * BLOCK), *[60] * ((num_blocks - num_shared) * BLOCK)]
    room.add("new", prompt, job_id="new", max_tokens=1)
    return room


def test_a_new_job_waits_for_room_beside_those_that_will_be_back() -> None:
    """The trace reports once that the job waits, and why. It begins when one of the others has finished."""
    room = crowded()
    for _ in range(3):
        room.step()
    assert not room.is_started("new")
    (parking,) = room.parkings()
    assert parking.req_id == "new"
    assert parking.allowed_blocks == 32
    assert 28 <= parking.needed_blocks <= 30  # both returning jobs, and the running turn
    room.add("one-2", [*room.tokens["one"], 7], job_id="one", is_last_step=True, max_tokens=1)
    for _ in range(4):
        room.step()
    assert "one-2" in room.finished
    assert room.is_started("new")


def test_a_job_that_another_waits_for_goes_on_for_it() -> None:
    """It begins, where a new job and the same parent's second child wait, and ranks as old as its parent."""
    room = crowded()
    for name in ("child", "second"):
        room.add(name, [70] * (14 * BLOCK), job=JobRef(name, parent_id="two"), max_tokens=8)
    for _ in range(2):
        room.step()
    assert [room.is_started(name) for name in ("new", "child", "second")] == [False, True, False]
    two = room.scheduler.policy.job("two", room.clock.now())
    assert two is not None
    assert two.children == ["child", "second"]
    while "child" not in room.finished:
        room.step()
    room.step()
    assert [room.is_started(name) for name in ("new", "second")] == [False, True]


def test_nobody_waits_for_itself() -> None:
    """Neither a circle of parents nor a long row of them does harm."""
    room = Room()
    names = [f"job-{number}" for number in range(40)]
    for name, parent in zip(names, [names[-1], *names], strict=False):
        room.add(name, [1] * BLOCK, job=JobRef(name, parent_id=parent), max_tokens=1)
    room.add("again", [1] * BLOCK, job=JobRef(names[0], parent_id=names[-1]), max_tokens=1)
    for _ in range(60):
        room.step()
    assert {*names, "again"} <= room.finished.keys()


@pytest.mark.parametrize("num_states", [0, 17])
def test_without_a_host_tier_they_are_to_find_room_in_the_pool(num_states: int) -> None:
    """Both pins have expired, so the new job fits now, but not once the others return. States have a separate
    pool and free no KV blocks."""
    room = crowded(num_host_blocks=0, config=HOLD_BRIEFLY, num_blocks=11, num_states=num_states)
    room.clock.advance(3.0)
    room.step()
    assert room.scheduler.statistics().num_pinned_blocks == 0
    assert not room.is_started("new")
    assert room.parked() == ["new"]


def test_what_jobs_begin_with_in_common_counts_once() -> None:
    """With six common first blocks the same three jobs fit."""
    room = crowded(num_host_blocks=0, config=HOLD_BRIEFLY, num_blocks=11, num_shared=6)
    room.clock.advance(3.0)
    room.step()
    assert room.is_started("new")
    assert not room.parked()


@pytest.mark.parametrize(("num_host_blocks", "takes_s"), [(HOST_BLOCKS, 3000.0), (0, 300.0)])
def test_whose_calls_take_for_ever_keeps_nobody_out(num_host_blocks: int, takes_s: float) -> None:
    """Large contexts do not count while their calls take over ten minutes, or over fifty seconds if nothing
    will be pinned for them."""
    room = Room(num_host_blocks)
    room.learn("sleep", takes_s)
    room.add("runs", [50] * 4, max_tokens=80)
    for job_id in ("one", "two"):
        room.begin(job_id, 14, "sleep 9")
    room.add("new", [60] * (12 * BLOCK), job_id="new", max_tokens=1)
    room.clock.advance(30.0)
    room.step()
    assert room.is_started("new")


def test_a_parked_job_waits_no_longer_than_its_bound_and_stands_in_nobodys_way() -> None:
    """A later question is answered at once, a later job queues after the parked one. After ``max_wait_s`` the
    others' needs no longer count."""
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


def test_a_job_that_takes_little_is_not_kept_waiting() -> None:
    """A job that is expected to need at most ``small_job_share`` of the pool begins at once, and does not
    queue after parked jobs."""
    room = crowded(config=replace(CONFIG, small_job_share=0.1))
    room.add("short", [61] * (2 * BLOCK), job_id="short", max_tokens=1)
    room.add("longer", [62] * (4 * BLOCK), job_id="longer", max_tokens=1)
    for _ in range(3):
        room.step()
    assert room.is_started("short")
    assert not room.is_started("longer")


def test_the_only_job_may_always_begin() -> None:
    """With nothing running, a job begins whatever the others may need."""
    room = crowded()
    room.step()
    while "runs" not in room.finished:
        room.step()
    for _ in range(2):
        room.step()
    assert room.is_started("new")


def test_an_urgent_job_does_not_wait_for_those_that_wait_behind_it() -> None:
    """An awaited job needs the whole pool, and only a turn of a worse priority runs. The new job begins,
    since that turn can be preempted. A job of the turn's own priority waits."""
    room = Room(num_host_blocks=0)
    room.learn("ls", 0.5)
    room.begin("awaited", 24, "ls")
    behind = room.add("behind", [7] * 40, job_id="behind", priority=1, max_tokens=8)
    room.step()
    assert behind in room.scheduler.running
    urgent = room.add("urgent", [8] * 60, job_id="urgent")
    assert room.scheduler.policy.may_admit(urgent, 0, room.clock.now())
    equal = room.add("equal", [9] * 60, job_id="equal", priority=1)
    assert not room.scheduler.policy.may_admit(equal, 0, room.clock.now())

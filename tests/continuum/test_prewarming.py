"""Requests that run ahead of a job's next turn: they end no tool call, take nothing from others, and what
they compute is held until the turn comes."""

from __future__ import annotations

from itertools import count
from random import Random

import pytest

from engine.core.request import RequestStatus
from engine.records.messages import JobFinished, JobRef
from tests.continuum.job_room import BLOCK, JobRoom, Kept
from tracing.events import JobEvent, PinEvent
from tracing.tracer import Tracer

PROMPT = [1] * 96
PART = 64


def early(room: JobRoom, request_id: str, prompt: list[int], job_id: str | None = "job") -> None:
    """Sends a part of the next turn's prompt and computes it."""
    room.ask(request_id, prompt, job_id, prewarms=True, max_tokens=1)
    room.run()


@pytest.mark.parametrize("job_id", ["job", None])
def test_results_that_come_early_are_computed_while_the_tool_runs(job_id: str | None) -> None:
    room = JobRoom()
    room.turn("r1", PROMPT, job_id, num_replies=0)
    room.read("r1", "make")
    said = room.said("r1")
    result = [5] * (3 * PART)
    for number in (1, 2, 3):
        room.advance(2)
        room.ask(f"p{number}", said + result[: number * PART], job_id, prewarms=True, num_replies=1)
        room.run()
        assert room.finished[f"p{number}"].receipt is None
        assert room.num_pins == 1
    room.advance(2)
    receipt = room.turn("r2", [*said, *result, 7, 7], job_id, num_replies=1, num_results=1)
    assert (receipt.turn, receipt.previous_pin) == (2, "handed_over")
    assert receipt.gap_s == pytest.approx(8, abs=1)
    assert receipt.cached_tokens == len(said + result) // BLOCK * BLOCK
    assert receipt.recomputed_tokens == 0
    known = len(said) // BLOCK * BLOCK
    assert receipt.prewarmed_tokens == pytest.approx(receipt.cached_tokens - known, abs=BLOCK)
    assert room.ends() == {"released": 3, "handed_over": 1}


def test_the_tools_duration_is_that_of_the_whole_gap() -> None:
    """Two jobs with the same calls, one with early results: both teach the same."""
    learned = []
    for is_early in (False, True):
        room = JobRoom()
        for number in range(12):
            job_id = f"job{number}"
            room.turn(f"r{number}", [*PROMPT, number], job_id)
            room.read(f"r{number}", "make")
            said = room.said(f"r{number}")
            room.advance(1)
            if is_early:
                early(room, f"p{number}", said + [5] * 40, job_id)
            room.advance(3)
            room.turn(f"s{number}", said + [5] * 60, job_id, last=True)
        room.turn("last", [9] * 96, "last")
        learned.append(room.read("last", "make").expected_tool_s)
    assert learned[0] is not None
    assert learned[1] == pytest.approx(learned[0], rel=0.2)


def test_what_others_had_computed_was_not_prewarmed() -> None:
    """A second job has the same history and gets the same result."""
    room = JobRoom()
    said = [*PROMPT, *[4] * 32]
    told = []
    for job_id in ("one", "two"):
        room.turn(f"{job_id}-1", said[: len(PROMPT)], job_id, max_tokens=1)
        room.read(f"{job_id}-1", "make")
        prompt = [*said, *[5] * 96]
        room.ask(f"{job_id}-p", prompt, job_id, prewarms=True, max_tokens=1)
        room.run()
        told.append(room.turn(f"{job_id}-2", [*prompt, 7], job_id).prewarmed_tokens)
    assert told[0] >= 96
    assert told[1] == 0


def test_it_waits_behind_all_others_and_takes_nobodys_pin() -> None:
    room = JobRoom(num_blocks=33)
    room.turn("r1", PROMPT, "job")
    room.read("r1", "make")
    room.turn("o1", [2] * 256, "other")
    room.read("o1", "make")
    assert room.num_pins == 2
    room.ask("p1", [*room.said("r1"), *[5] * 200], "job", prewarms=True, max_tokens=1)
    room.ask("new", [3] * 32, "new", max_tokens=1)
    for _ in range(8):
        room.step()
    assert "new" in room.finished
    assert "p1" not in room.finished
    assert room.num_pins == 3
    room.scheduler.signal(JobFinished("other"), room.clock.now())
    room.run()
    assert "p1" in room.finished
    assert room.num_pins == 2


def test_what_it_computed_goes_with_its_job() -> None:
    room = JobRoom()
    room.turn("r1", PROMPT, "job")
    room.read("r1", "make")
    room.ask("p1", [*room.said("r1"), *[5] * 64], "job", prewarms=True, max_tokens=1)
    room.scheduler.signal(JobFinished("job"), room.clock.now())
    room.run()
    assert room.num_pins == 0


def test_without_a_turn_before_it_is_the_jobs_first() -> None:
    """A prompt that is cached before the job begins is held as its client asks."""
    room = JobRoom()
    receipt = room.turn("p1", PROMPT, "job", prewarms=True, max_tokens=1)
    assert receipt.turn == 1
    assert room.num_pins == 1


def test_a_job_that_moved_is_taken_up_first() -> None:
    """Another core has run its last turn; the early result comes before the turn."""
    one, two = JobRoom(), JobRoom()
    one.turn("r1", PROMPT, "job")
    one.read("r1", "make")
    one.advance(3)
    (pin,) = one.policy.pins()
    moved = one.policy.moved_turn(pin, one.clock.now())
    prompt = [*one.said("r1"), *[5] * 64]
    two.add("p1", prompt, max_tokens=1, job=JobRef("job", prewarms=True, moved=moved))
    two.run()
    two.advance(2)
    receipt = two.turn("r2", [*prompt, 7, 7], "job")
    assert receipt.turn == 2
    assert receipt.gap_s == pytest.approx(5, abs=1)
    assert receipt.cached_tokens == len(prompt) // BLOCK * BLOCK


def test_the_trace_tells_what_was_prewarmed_and_held() -> None:
    kept = Kept()
    room = JobRoom(tracer=Tracer(kept))
    room.turn("r1", PROMPT, "job")
    room.read("r1", "make")
    early(room, "p1", [*room.said("r1"), *[5] * 64])
    events = [each for each in kept.events if isinstance(each, JobEvent) and each.kind == "prewarmed"]
    assert [(each.req_id, each.continues, each.turn) for each in events] == [("p1", "r1", 1)]
    pins = [each for each in kept.events if isinstance(each, PinEvent) and each.kind in ("created", "ended")]
    assert [(each.kind, each.req_id) for each in pins] == [
        ("created", "r1"),
        ("ended", "r1"),
        ("created", "r1"),
    ]
    assert pins[2].deadline_s is not None
    assert pins[2].num_blocks > pins[0].num_blocks


class Agents:
    """Random agents in few blocks: their tools' results come early in parts, in time, or never."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.num_blocks = self.random.choice((32, 40, 80))
        self.room = JobRoom(num_blocks=self.num_blocks)
        self.numbers = count()
        self.said: dict[str, list[int]] = {}
        """What each job has said so far, if no turn of it is open."""
        self.open: dict[str, str] = {}
        """The open turn of each job."""
        self.num_early = 0

    def act(self) -> None:
        job = f"job{self.random.randrange(5)}"
        act = self.random.choice((self._turn, self._turn, self._early, self._early, self._finish))
        act(job)
        for _ in range(self.random.choice((0, 1, 3, 12))):
            self.room.step(self.random.choice((0.01, 0.5)))
            self.room.check_invariants()
        for each, request_id in list(self.open.items()):
            if request_id in self.room.finished:
                del self.open[each]
                self.said[each] = self.room.said(request_id)
                self.room.read(request_id, self.random.choice(("make", "ls")))

    def _turn(self, job: str) -> None:
        if job in self.open:
            return
        said = self.said.pop(job, [])
        request_id = f"r{next(self.numbers)}"
        self.open[job] = request_id
        prompt = [*said, *self._new()]
        if len(prompt) > 300:
            prompt = prompt[:40]
        request = self.room.ask(request_id, prompt, job, max_tokens=6)
        for useless in list(self.room.policy.made_useless(request)):
            aborted = RequestStatus.FINISHED_ABORTED
            self.room.scheduler.finish_requests([useless], aborted, self.room.clock.now())

    def _early(self, job: str) -> None:
        if job in self.said:
            request_id = f"p{next(self.numbers)}"
            self.num_early += 1
            prompt = [*self.said[job], *self._new()]
            self.room.ask(request_id, prompt, job, prewarms=True, max_tokens=1)

    def _finish(self, job: str) -> None:
        if job not in self.open and self.random.random() < 0.2:
            self.said.pop(job, None)
            self.room.scheduler.signal(JobFinished(job), self.room.clock.now())

    def _new(self) -> list[int]:
        return [self.random.randrange(3)] * self.random.randrange(1, 90)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_among_random_agents(seed: int) -> None:
    """However results come, every turn ends, and once the jobs are over every block is free."""
    agents = Agents(seed)
    for _ in range(150):
        agents.act()
    room = agents.room
    assert agents.num_early > 10
    for job in range(5):
        room.scheduler.signal(JobFinished(f"job{job}"), room.clock.now())
    room.run()
    room.check_invariants()
    assert room.num_pins == 0
    assert room.scheduler.kv.num_free_blocks == agents.num_blocks - 1
    assert set(agents.open.values()) <= room.finished.keys()

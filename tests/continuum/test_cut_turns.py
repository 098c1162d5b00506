"""Who is cut off while waiting and asks the same again keeps its place in the queue."""

from __future__ import annotations

import pytest

from continuum.jobs.cut_turns import KEPT_S
from engine.core.request import RequestStatus
from tests.continuum.job_room import JobRoom

QUESTION = list(range(100, 150))
MAX_WAIT_S = 50.0


class Room(JobRoom):
    """All seats are taken when the question comes, and another one comes behind it."""

    def __init__(self, job_id: str | None = "job", tenant: str | None = None) -> None:
        """``tenant``: whose the question is."""
        super().__init__(num_blocks=257, max_wait_s=MAX_WAIT_S, max_return_wait_s=MAX_WAIT_S)
        self.busy = 0
        self.fill()
        self.ask("asked", QUESTION, job_id, tenant=tenant)
        self.step()
        self.ask("other", [7] * 50, "other")

    def fill(self) -> None:
        """Four requests run that end by and by."""
        for _ in range(4):
            self.busy += 1
            self.ask(f"busy{self.busy}", [1000 + self.busy] * 8, f"busy{self.busy}", max_tokens=6 + self.busy)
        self.step()

    def cut(self, request_id: str) -> None:
        """Its client has gone."""
        status = RequestStatus.FINISHED_ABORTED
        assert self.scheduler.finish_requests([request_id], status, self.clock.now())

    def starts(self) -> list[str]:
        """Who begins from now on, in order."""
        started = []
        while self.scheduler.waiting:
            started += [new.req_id for new in self.step().scheduled_new_reqs]
        return started


@pytest.mark.parametrize("job_id", ["job", None])
def test_who_asks_again_keeps_its_place(job_id: str | None) -> None:
    """Named by its client or not, and how often ever it is cut."""
    room = Room(job_id)
    for attempt in ("asked", "again"):
        room.cut(attempt)
        room.advance(1.0)
        room.ask("again" if attempt == "asked" else "at-last", QUESTION, job_id)
    assert room.starts() == ["at-last", "other"]
    room.run()
    receipt = room.finished["at-last"].receipt
    assert receipt is not None
    assert receipt.turn == 1


def test_the_bound_on_waits_counts_from_the_first_time() -> None:
    """Before all others when the first request would have been overdue."""
    room = Room()
    room.advance(MAX_WAIT_S - 2)
    room.cut("asked")
    room.ask("again", QUESTION, "job")
    room.advance(2.0)
    room.ask("urgent", [9] * 20, "urgent")
    room.scheduler.requests["urgent"].priority = -1
    room.scheduler.waiting.rekey(
        room.scheduler.requests["urgent"],
        room.policy.waiting_key(room.scheduler.requests["urgent"], room.clock.now()),
    )
    assert room.starts()[:2] == ["again", "other"]


def test_it_is_the_same_if_the_cut_is_noticed_late() -> None:
    """The connection is lost, the request comes again, and only then the first one is aborted."""
    room = Room()
    room.ask("again", QUESTION, "job")
    room.cut("asked")
    assert room.starts() == ["again", "other"]


@pytest.mark.parametrize("case", ["another prompt", "a job", "another tenant", "much later", "it ran"])
def test_others_begin_to_wait_when_they_come(case: str) -> None:
    """The place is kept for the same question in the same job, or in none, of the same tenant, for as long as
    clients take to ask again, and only for one that waited."""
    room = Room(job_id=None, tenant="bob" if case == "another tenant" else None)
    if case == "it ran":
        while room.scheduler.requests["asked"].status is not RequestStatus.RUNNING:
            room.step()
        room.fill()
        room.ask("third", [8] * 50)
    room.cut("asked")
    if case == "much later":
        room.advance(KEPT_S)
        assert room.policy.waiting_key(room.scheduler.requests["other"], room.clock.now())[0] == 0
    prompt = [*QUESTION[:-1], 7] if case == "another prompt" else QUESTION
    job_id = "job" if case == "a job" else None
    room.ask("again", prompt, job_id)
    assert room.starts()[-1] == "again"


def test_a_turn_that_was_cut_is_counted_once() -> None:
    """What repeats it has its number, whether it had run or not; another prompt is one more."""
    room = JobRoom()
    for attempt, num_steps in (("r1", 0), ("r1-again", 2)):
        room.ask(attempt, QUESTION, "job")
        for _ in range(num_steps):
            room.step()
        room.scheduler.finish_requests([attempt], RequestStatus.FINISHED_ABORTED, room.clock.now())
    assert room.turn("r1-at-last", QUESTION, "job").turn == 1
    assert room.turn("r2", [*QUESTION[:-1], 7], "job").turn == 2


def test_what_is_remembered_of_cut_turns_is_bounded() -> None:
    """Each is used once: of two that were cut two may come again, and no third."""
    room = Room(job_id=None)
    room.ask("twin", QUESTION)
    for name in ("asked", "twin"):
        room.cut(name)
    for name in ("one", "two", "three"):
        room.ask(name, QUESTION)
    assert room.starts() == ["one", "other", "two", "three"]

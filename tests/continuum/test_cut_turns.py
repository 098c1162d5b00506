"""A waiting request that is cut off and sent again keeps its place in the queue."""

from __future__ import annotations

import pytest

from continuum.jobs.cut_turns import KEPT_S
from engine.core.request import RequestStatus
from tests.continuum.job_room import JobRoom

QUESTION = list(range(100, 150))
MAX_WAIT_S = 50.0


class Room(JobRoom):
    """All slots are taken when the question arrives, and another request arrives after it."""

    def __init__(self, job_id: str | None = "job", tenant: str | None = None) -> None:
        """``tenant``: the question's tenant."""
        super().__init__(num_blocks=257, max_wait_s=MAX_WAIT_S, max_return_wait_s=MAX_WAIT_S)
        self.busy = 0
        self.fill()
        self.ask("asked", QUESTION, job_id, tenant=tenant)
        self.step()
        self.ask("other", [7] * 50, "other")

    def fill(self) -> None:
        """Starts four requests that end one after another."""
        for _ in range(4):
            self.busy += 1
            self.ask(f"busy{self.busy}", [1000 + self.busy] * 8, f"busy{self.busy}", max_tokens=6 + self.busy)
        self.step()

    def cut(self, request_id: str) -> None:
        """Aborts the request, as when its client disconnects."""
        status = RequestStatus.FINISHED_ABORTED
        assert self.scheduler.finish_requests([request_id], status, self.clock.now())

    def starts(self) -> list[str]:
        """Runs until no request waits; returns those that start, in order."""
        started = []
        while self.scheduler.waiting:
            started += [new.req_id for new in self.step().scheduled_new_reqs]
        return started


@pytest.mark.parametrize("job_id", ["job", None])
def test_who_asks_again_keeps_its_place(job_id: str | None) -> None:
    """A repeated request keeps its place, named or not, however often it is cut off."""
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
    """The wait of the first attempt counts: once overdue it goes before all others."""
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
    """The place is kept also if the retry arrives before the abort of the first request."""
    room = Room()
    room.ask("again", QUESTION, "job")
    room.cut("asked")
    assert room.starts() == ["again", "other"]


@pytest.mark.parametrize("case", ["another prompt", "a job", "another tenant", "much later", "it ran"])
def test_others_begin_to_wait_when_they_come(case: str) -> None:
    """The place is kept only for the same prompt, job and tenant, within the time that clients take to retry,
    and only if the request had waited."""
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
    """A retry has the number of the aborted turn, whether that had run or not; another prompt is a new
    turn."""
    room = JobRoom()
    for attempt, num_steps in (("r1", 0), ("r1-again", 2)):
        room.ask(attempt, QUESTION, "job")
        for _ in range(num_steps):
            room.step()
        room.scheduler.finish_requests([attempt], RequestStatus.FINISHED_ABORTED, room.clock.now())
    assert room.turn("r1-at-last", QUESTION, "job").turn == 1
    assert room.turn("r2", [*QUESTION[:-1], 7], "job").turn == 2


def test_what_is_remembered_of_cut_turns_is_bounded() -> None:
    """Each remembered place is used once: after two aborts two retries keep their place, a third does not."""
    room = Room(job_id=None)
    room.ask("twin", QUESTION)
    for name in ("asked", "twin"):
        room.cut(name)
    for name in ("one", "two", "three"):
        room.ask(name, QUESTION)
    assert room.starts() == ["one", "other", "two", "three"]

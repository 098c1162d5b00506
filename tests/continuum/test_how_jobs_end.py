"""When a job is over, and which job is forgotten first."""

from __future__ import annotations

import pytest

from engine.core.request import RequestStatus
from engine.records.messages import JobFinished
from engine.records.reported_stats import JobStats
from tests.continuum.job_room import JobRoom

TASK = [3] * 40


def told(room: JobRoom) -> JobStats:
    """The statistics of jobs since the last call."""
    stats = room.scheduler.make_stats().jobs
    assert stats is not None
    return stats


def outcomes(room: JobRoom) -> list[str]:
    return [each.outcome for each in told(room).ended]


@pytest.fixture
def room() -> JobRoom:
    """A job whose second turn runs."""
    room = JobRoom()
    room.turn("r1", TASK, "a")
    room.read("r1", "ls")
    room.ask("r2", [*room.said("r1"), 7], "a")
    room.step()
    return room


def test_nothing_is_held_of_a_turn_that_ends_after_its_job(room: JobRoom) -> None:
    """If a client finishes the job while a turn runs, that turn ends as a last turn, and the job ends with
    it."""
    room.scheduler.signal(JobFinished("a"), room.clock.now())
    assert outcomes(room) == []
    room.run()
    receipt = room.finished["r2"].receipt
    assert receipt is not None
    assert (receipt.pinned_tokens, receipt.reason) == (0, "last step of the job")
    assert room.num_pins == 0
    assert outcomes(room) == ["finished"]
    assert room.policy.job("a", room.clock.now()) is None


def test_nor_of_one_that_is_aborted(room: JobRoom) -> None:
    """An aborted turn of a finished job leaves no pin, nor does the turn that it continued."""
    room.scheduler.signal(JobFinished("a"), room.clock.now())
    room.scheduler.finish_requests(["r2"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    assert (room.num_pins, outcomes(room)) == (0, ["finished"])
    assert room.policy.job("a", room.clock.now()) is None


def test_a_branch_ends_with_the_last_step_of_another(room: JobRoom) -> None:
    """After the last step of one branch, a sub-agent's turn that still runs is not pinned either."""
    room.ask("last", [*TASK, 9], "a", last=True, max_tokens=2)
    room.run()
    assert room.num_pins == 0
    assert outcomes(room) == ["finished"]


def test_a_turn_that_comes_all_the_same_begins_again(room: JobRoom) -> None:
    """A turn that arrives while the job's last turn still runs continues the job."""
    room.scheduler.signal(JobFinished("a"), room.clock.now())
    room.ask("r3", [*TASK, 9], "a")
    room.run()
    assert room.num_pins == 2
    assert outcomes(room) == []


def test_the_job_idle_longest_is_forgotten_first() -> None:
    """The job idle for longest is forgotten first, not the one that arrived first."""
    room = JobRoom(max_jobs=2, answer_ttl_s=0.0, grace_s=0.01)
    room.ask("a1", TASK, "a", max_tokens=60)
    room.step()
    room.turn("b1", [4] * 40, "b", max_tokens=1)
    room.read("b1")
    room.run()
    room.read("a1")
    room.advance(1)
    assert [job.id for job in room.policy.jobs(1, room.clock.now())] == ["a"]
    room.turn("c1", [5] * 40, "c")
    room.turn("d1", [6] * 40, "d")
    assert {job.id for job in room.policy.jobs(9, room.clock.now())} == {"a", "c", "d"}


def test_an_expectation_that_nobody_has_is_not_told() -> None:
    """A tool whose calls were all cut off has no median, so neither receipts nor error metrics report inf."""
    room = JobRoom(job_idle_s=100.0)
    room.turn("a1", TASK, "a")
    room.read("a1", "make")
    room.advance(200)
    room.turn("b1", [4] * 40, "b")
    assert room.read("b1", "make").expected_tool_s is None
    room.advance(1)
    room.turn("b2", [*room.said("b1"), 7], "b")
    assert told(room).gap_errors_s == []

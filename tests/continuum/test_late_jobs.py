"""A new job that is expected to begin too late is named, so that it can be refused at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from continuum.queueing.begin_rate import MIN_INTERVALS, BeginRate
from engine.core.request import Request, RequestStatus
from engine.records.messages import JobRef
from tests.continuum.test_admission import BLOCK, CONFIG, Room

INTERVAL_S = 20.0
"""Four steps of a job, which begins when the one before it has ended."""
PATIENT = replace(CONFIG, max_wait_s=1e6)


def busy(config: object = PATIENT) -> Room:
    """Jobs of most of the pool begin every twenty seconds, one after the other; one runs, others wait."""
    room = Room(num_host_blocks=0, config=config)  # type: ignore[arg-type]
    for number in range(MIN_INTERVALS + 5):
        arrive(room, f"job-{number}")
    for number in range(MIN_INTERVALS + 2):
        end(room, f"job-{number}")
    room.step()
    assert room.is_started(f"job-{MIN_INTERVALS + 2}")
    assert not room.is_started(f"job-{MIN_INTERVALS + 3}")
    return room


def arrive(room: Room, name: str, job: JobRef | None = None, *, priority: int = 0) -> Request:
    token = 1000 + len(room.begun)
    room.begun[name] = token
    job = job or JobRef(name, is_last_step=True)
    return room.add(name, [token] * (20 * BLOCK), job=job, max_tokens=2, priority=priority)


def end(room: Room, name: str) -> None:
    while name not in room.finished:
        room.step()
        room.clock.advance(INTERVAL_S / 4)


def late_by_s(room: Room, request: Request) -> float | None:
    return room.scheduler.policy.late_by_s(request, room.clock.now())


def test_a_job_behind_others_waits_an_interval_for_each() -> None:
    """Two jobs wait before it, so it begins after the third interval."""
    room = busy()
    request = arrive(room, "new", JobRef("new", deadline_s=1.0))
    late = late_by_s(room, request)
    assert late is not None
    assert late == pytest.approx(3 * INTERVAL_S - 1.0, rel=0.1)
    assert late_by_s(room, arrive(room, "patient", JobRef("patient", deadline_s=1000.0))) is None
    assert late_by_s(room, arrive(room, "any", JobRef("any"))) is None


def test_the_flag_bounds_all_jobs_and_the_smaller_bound_counts() -> None:
    room = busy(replace(PATIENT, max_first_wait_s=5.0))
    by_flag = late_by_s(room, arrive(room, "by-flag"))
    by_both = late_by_s(room, arrive(room, "by-both", JobRef("by-both", deadline_s=1.0)))
    assert by_flag is not None
    assert by_both is not None
    assert by_both > by_flag > 0


def test_nothing_is_said_of_turns_of_jobs_that_have_begun() -> None:
    """A later turn is not refused, although new jobs wait; it goes before them."""
    room = busy()
    name = f"job-{MIN_INTERVALS + 2}"
    again = [*room.tokens[name], 7]
    later = room.add("later", again, job=JobRef(name, deadline_s=1.0), max_tokens=2)
    assert late_by_s(room, later) is None


def test_a_better_priority_does_not_wait_for_a_worse_one() -> None:
    room = busy()
    first = late_by_s(room, arrive(room, "urgent", JobRef("urgent", deadline_s=0.5), priority=-1))
    last = late_by_s(room, arrive(room, "idle", JobRef("idle", deadline_s=0.5), priority=1))
    assert last is not None
    assert first is None or first < last


def test_one_tenants_flood_does_not_refuse_another() -> None:
    """A tenant of whom nobody waits is not counted behind the waiting jobs of others."""
    room = busy()
    for number in range(20):
        arrive(room, f"flood-{number}")
    quiet = late_by_s(room, arrive(room, "quiet", JobRef("quiet", tenant="quiet", deadline_s=45.0)))
    assert quiet is None


def test_few_intervals_predict_nothing() -> None:
    rate = BeginRate()
    for begun_s in range(MIN_INTERVALS):
        rate.begun(float(begun_s))
        assert rate.wait_s(3) is None
    rate.begun(float(MIN_INTERVALS))
    assert rate.wait_s(3) == pytest.approx(4.0)


def test_time_in_which_none_waits_does_not_count() -> None:
    rate = BeginRate()
    for begun_s in range(MIN_INTERVALS + 1):
        rate.begun(float(begun_s))
    rate.wait_began()
    rate.begun(1000.0)
    rate.begun(1001.0)
    assert rate.wait_s(0) == pytest.approx(1.0)


def test_a_job_that_comes_again_waits_as_before() -> None:
    """A refused job leaves nothing behind that would let its next request pass the others."""
    room = busy()
    request = arrive(room, "new", JobRef("new", deadline_s=1.0))
    before = late_by_s(room, request)
    room.scheduler.finish_requests(["new"], RequestStatus.FINISHED_ERROR, room.clock.now())
    assert room.scheduler.policy.job("new", room.clock.now()) is None
    room.step()
    again = room.add(
        "again", request.all_token_ids[: 20 * BLOCK], job=JobRef("new", deadline_s=1.0), max_tokens=2
    )
    assert late_by_s(room, again) == pytest.approx(before)
    room.step()
    assert not room.is_started("again")


def test_the_next_job_to_begin_is_not_refused() -> None:
    """It may begin at any time: nothing stands before it but jobs that run."""
    room = busy(replace(PATIENT, max_first_wait_s=0.0))
    end(room, f"job-{MIN_INTERVALS + 3}")
    end(room, f"job-{MIN_INTERVALS + 4}")
    assert late_by_s(room, arrive(room, "next")) is None


def test_a_job_that_began_elsewhere_is_not_refused() -> None:
    """Its prompt has replies of the model: another server, or this one before a restart, has served it."""
    room = busy()
    assert late_by_s(room, arrive(room, "moved", JobRef("moved", deadline_s=1.0, num_replies=3))) is None

"""What is left of a job, learned from jobs like it; and what the order makes of that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum.config import ContinuumConfig
from continuum.forecast import MAX_KINDS, JobCourse, WorkForecast
from continuum.policy import ContinuumPolicyFactory
from engine.messages import ToolCall, ToolGapStarted
from engine.policy import PolicyContext
from tests.core.engine_room import EngineRoom


def _serve(forecast: WorkForecast, kind: str, num_turns: int, service_s: float = 1.0) -> JobCourse:
    """A whole job, to its end."""
    course = forecast.course(kind)
    for _ in range(num_turns):
        course.begin_turn()
        course.end_turn(service_s)
    course.looks_finished()
    return course


def _begun(forecast: WorkForecast, kind: str, num_turns: int) -> JobCourse:
    """A job in its turn of this number."""
    course = forecast.course(kind)
    for _ in range(num_turns - 1):
        course.begin_turn()
        course.end_turn(1.0)
    course.begin_turn()
    return course


def test_nothing_is_forecast_before_anything_is_known() -> None:
    """Then jobs are ranked by their arrival alone."""
    forecast = WorkForecast()
    assert _begun(forecast, "new", 1).remaining_s == 0


def test_kinds_are_told_apart_and_a_job_gets_nearer_to_its_end() -> None:
    """Two turns of 1 s against twelve; in the eleventh turn of twelve little is left."""
    forecast = WorkForecast()
    for _ in range(40):
        _serve(forecast, "short", 2)
        _serve(forecast, "long", 12)
    short, long = _begun(forecast, "short", 1), _begun(forecast, "long", 1)
    assert short.remaining_s == pytest.approx(2, rel=0.25)
    assert long.remaining_s == pytest.approx(12, rel=0.25)
    assert 2 <= _begun(forecast, "long", 11).remaining_s < 4


def test_an_unknown_kind_is_taken_for_the_usual_one() -> None:
    """Its forecast lies between those of the kinds that are known."""
    forecast = WorkForecast()
    for _ in range(40):
        _serve(forecast, "short", 2)
        _serve(forecast, "long", 12)
    assert 2 < _begun(forecast, "never seen", 1).remaining_s < 12


def test_a_slow_job_has_more_left_than_a_quick_one() -> None:
    """Of the same kind and turn: what its own turns took counts."""
    forecast = WorkForecast()
    for _ in range(20):
        _serve(forecast, "agent", 6)
    quick, slow = _begun(forecast, "agent", 3), forecast.course("agent")
    for _ in range(2):
        slow.begin_turn()
        slow.end_turn(5.0)
    slow.begin_turn()
    assert slow.remaining_s > 1.5 * quick.remaining_s


def test_an_answer_that_was_not_the_last_is_taken_back() -> None:
    """A job that only seemed done teaches what one that went on teaches."""
    honest, hasty = WorkForecast(), WorkForecast()
    for _ in range(30):
        _serve(honest, "agent", 8)
        course = hasty.course("agent")
        for _ in range(8):
            course.begin_turn()
            course.end_turn(1.0)
            course.looks_finished()
    for number in (1, 4, 8):
        expected = _begun(honest, "agent", number).remaining_s
        assert _begun(hasty, "agent", number).remaining_s == pytest.approx(expected)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 600), st.floats(0, 1e3)), max_size=30))
def test_a_forecast_is_finite_and_at_least_the_turn_itself(jobs: list[tuple[str, int, float]]) -> None:
    """Whatever was learned."""
    forecast = WorkForecast()
    for kind, num_turns, service_s in jobs:
        _serve(forecast, kind, num_turns, service_s)
    for number in (1, 2, 40, 700):
        course = _begun(forecast, "a", number)
        assert 0 <= course.remaining_s < float("inf")


def test_kinds_are_bounded() -> None:
    """The one not seen longest is forgotten and begins anew."""
    forecast = WorkForecast()
    for _ in range(40):
        _serve(forecast, "first", 30)
    for number in range(MAX_KINDS):
        _serve(forecast, f"kind {number}", 1)
    assert _begun(forecast, "first", 1).remaining_s < 10


def test_of_two_new_jobs_the_one_that_is_sooner_done_goes_first() -> None:
    """Agents are told apart by how their prompts begin; a pool of one seat serves the short kind first."""
    block = 32
    config = ContinuumConfig(work_weight=1.0)
    policy = ContinuumPolicyFactory(config)(PolicyContext(block, 63))
    room = EngineRoom(
        policy, block_size=block, num_blocks=64, max_model_len=512, max_num_seqs=1, max_num_batched_tokens=512
    )
    openings = {"short": [1] * config.kind_tokens, "long": [2] * config.kind_tokens}
    for number in range(12):
        for kind, num_turns in (("short", 1), ("long", 6)):
            prompt = [*openings[kind], 100 + number]
            for index in range(num_turns):
                request_id = f"{kind}-{number}-{index}"
                room.add(request_id, prompt, job_id=f"{kind}-{number}")
                room.run()
                prompt = [*room.tokens[request_id], 7]
                calls = [ToolCall("bash", "ls")] if index + 1 < num_turns else []
                told = ToolGapStarted(request_id, calls)
                room.scheduler.signal(told, room.clock.now())
    room.add("busy", [3] * 40, max_tokens=8)
    room.step()
    room.add("long", [*openings["long"], 1], job_id="long")
    room.step()
    room.add("short", [*openings["short"], 1], job_id="short")
    room.run()
    assert list(room.finished)[-3:] == ["busy", "short", "long"]

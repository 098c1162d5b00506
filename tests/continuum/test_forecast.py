"""The forecast of a job's work, learned from similar jobs, and the order that follows from it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum.cli.main import main
from continuum.config import ContinuumConfig
from continuum.jobs.job import Job, Turn
from continuum.learning.work_forecast import MAX_KINDS, JobCourse, WorkForecast
from continuum.policy import ContinuumPolicyFactory
from continuum.queueing.order import RANKED_PER_STEP, IncrementalRerank
from engine.core.policy import PolicyContext
from engine.core.request import Request
from engine.records.messages import ToolCall, ToolGapStarted
from engine.records.sampling_params import SamplingParams
from estimator.kinds import Kind
from eval.report.results import read_results
from tests.core.engine_room import EngineRoom

TOKENS = 1000
"""Tokens of a job's first prompt, where size does not matter."""


def of(name: str | None, tenant: str | None = None) -> Kind | None:
    return None if name is None else Kind(tenant, name.encode())


def _serve(forecast: WorkForecast, kind: str | None, num_turns: int, service_s: float = 1.0) -> JobCourse:
    """Runs a whole job to its end."""
    course = forecast.course(of(kind), TOKENS)
    for _ in range(num_turns):
        course.begin_turn()
        course.end_turn(service_s)
    course.looks_finished()
    return course


def _short_and_long() -> WorkForecast:
    """Forty jobs of two turns of a second each, and forty of twelve: the mean is seven."""
    forecast = WorkForecast()
    for _ in range(40):
        _serve(forecast, "short", 2)
        _serve(forecast, "long", 12)
    return forecast


def test_nothing_is_forecast_before_anything_is_known() -> None:
    """Before anything is learned, jobs are ranked by arrival alone."""
    assert WorkForecast().excess_s(of("new")) == 0


def test_kinds_are_told_apart() -> None:
    """Forecasts differ by about as much as the kinds do."""
    forecast = _short_and_long()
    assert forecast.excess_s(of("short")) == pytest.approx(-5, rel=0.25)
    assert forecast.excess_s(of("long")) == pytest.approx(5, rel=0.25)


def test_where_all_are_of_one_kind_nobody_is_more_than_the_others() -> None:
    """With one kind of job no job ever differs from the mean, to the last bit, so the order is by age."""
    forecast = WorkForecast()
    for number in range(50):
        course = forecast.course(None, TOKENS)
        for _ in range(1 + number % 7):
            course.begin_turn()
            course.end_turn(0.1 + number)
            assert course.excess_s == 0
        course.looks_finished()


def test_kinds_by_name_alone_are_alike() -> None:
    """Two names of one agent, forty jobs each of five turns on average, differ by less than half a turn."""
    forecast = WorkForecast()
    for number in range(40):
        for kind in "ab":
            _serve(forecast, kind, 3 + number % 5)
    assert forecast.excess_s(of("a")) == pytest.approx(forecast.excess_s(of("b")), abs=0.5)


def test_kinds_with_large_prompts_are_more_work_before_any_job_has_ended() -> None:
    """Held blocks are known before any job has ended: a few turns are enough to price them."""
    forecast = WorkForecast()
    for _ in range(3):
        for kind, num_tokens in (("small", 2_000), ("large", 40_000)):
            course = forecast.course(of(kind), num_tokens)
            course.begin_turn()
            course.end_turn(5.0)
    assert forecast.excess_s(of("small")) < 0 < forecast.excess_s(of("large"))


def test_jobs_that_begin_like_no_other_are_alike() -> None:
    """Without distinguishing kinds jobs are equal, whatever their sizes: no seen feature separates them."""
    forecast = WorkForecast()
    courses = [forecast.course(of(f"only once {number}"), 1_000 * number) for number in range(1, 20)]
    for course in courses:
        course.begin_turn()
        course.end_turn(4.0)
    assert {course.excess_s for course in courses} == {0.0}


def test_a_kind_that_was_never_seen_is_taken_for_the_usual_one() -> None:
    """A new kind ranks between the known ones."""
    forecast = _short_and_long()
    assert (
        forecast.excess_s(of("short")) < forecast.excess_s(of("never seen")) < forecast.excess_s(of("long"))
    )


def test_an_answer_that_was_not_the_last_is_taken_back() -> None:
    """A job that only seemed finished teaches the same as one that was known to go on."""
    honest, hasty = WorkForecast(), WorkForecast()
    for _ in range(30):
        _serve(honest, "agent", 8)
        course = hasty.course(of("agent"), TOKENS)
        for _ in range(8):
            course.begin_turn()
            course.end_turn(1.0)
            course.looks_finished()
        for forecast in (honest, hasty):
            _serve(forecast, "other", 2)
    assert honest.excess_s(of("agent")) > 2
    assert hasty.excess_s(of("agent")) == pytest.approx(honest.excess_s(of("agent")), rel=0.05)


_JOBS = st.lists(
    st.tuples(
        st.sampled_from([None, "a", "b", "c"]),
        st.integers(0, 12),
        st.floats(0, 1e3),
        st.integers(1, 200_000),
        st.booleans(),
    ),
    max_size=20,
)


@given(_JOBS)
def test_a_forecast_is_finite(jobs: list[tuple[str | None, int, float, int, bool]]) -> None:
    """Whatever was learned, forecasts are finite, and constant between lessons."""
    forecast = WorkForecast()
    for kind, num_turns, service_s, num_tokens, ends in jobs:
        course = forecast.course(of(kind), num_tokens)
        for _ in range(num_turns):
            lessons, told = forecast.num_lessons, forecast.excess_s(of("a"))
            course.begin_turn()
            course.end_turn(service_s)
            assert forecast.num_lessons > lessons or forecast.excess_s(of("a")) == told
        if ends:
            course.looks_finished()
        assert math.isfinite(course.excess_s)
        assert math.isfinite(forecast.excess_s(of("b")))


def test_kinds_are_bounded() -> None:
    """The kind not seen for longest is forgotten and starts over."""
    forecast = WorkForecast()
    for _ in range(40):
        _serve(forecast, "first", 30)
    _serve(forecast, "second", 1)
    _serve(forecast, "second", 1)
    assert forecast.excess_s(of("first")) > 0
    for number in range(MAX_KINDS):
        _serve(forecast, f"kind {number}", 1)
    assert forecast.excess_s(of("first")) == 0


def test_a_tenant_with_many_kinds_displaces_its_own() -> None:
    """Another tenant's kind stays known."""
    forecast = WorkForecast()
    for _ in range(40):
        course = forecast.course(of("agent", "quiet"), TOKENS)
        for _ in range(30):
            course.begin_turn()
            course.end_turn(1.0)
        course.looks_finished()
    for number in range(2 * MAX_KINDS):
        forecast.course(of(f"kind {number}", "flood"), TOKENS)
    assert forecast.excess_s(of("agent", "quiet")) > 0


OPENINGS = {"short": [1] * 128, "long": [2] * 128}


def _room() -> EngineRoom:
    """A room with one slot, and the order by forecast."""
    block = 32
    policy = ContinuumPolicyFactory(ContinuumConfig(work_weight=1.0))(PolicyContext(block, 63))
    return EngineRoom(
        policy, block_size=block, num_blocks=64, max_model_len=512, max_num_seqs=1, max_num_batched_tokens=512
    )


def _play(room: EngineRoom, kind: str, number: int, num_turns: int) -> None:
    prompt = [*OPENINGS[kind], 100 + number]
    for index in range(num_turns):
        request_id = f"{kind}-{number}-{index}"
        room.add(request_id, prompt, job_id=f"{kind}-{number}")
        room.run()
        prompt = [*room.tokens[request_id], 7]
        calls = [ToolCall("bash", "ls")] if index + 1 < num_turns else []
        room.scheduler.signal(ToolGapStarted(request_id, calls), room.clock.now())


def test_of_two_new_jobs_the_one_that_is_sooner_done_goes_first() -> None:
    """Agents are distinguished by the beginning of their prompts; with one slot the short kind goes first."""
    room = _room()
    for number in range(12):
        _play(room, "short", number, 1)
        _play(room, "long", number, 6)
    room.add("busy", [3] * 40, max_tokens=8)
    room.step()
    room.add("long", [*OPENINGS["long"], 1], job_id="long")
    room.step()
    room.add("short", [*OPENINGS["short"], 1], job_id="short")
    room.run()
    assert list(room.finished)[-3:] == ["busy", "short", "long"]


def test_those_that_wait_are_ranked_anew_by_what_is_learned_meanwhile() -> None:
    """The kinds look equal when the two jobs arrive; then a job of one kind runs for very long."""
    room = _room()
    for number in range(3):
        _play(room, "short", number, 1)
    _play(room, "long", 0, 1)
    room.add("runs", [*OPENINGS["long"], 1], job_id="runs", max_tokens=300)
    room.step()
    room.add("long", [*OPENINGS["long"], 2], job_id="long")
    room.step()
    room.add("short", [*OPENINGS["short"], 2], job_id="short")
    room.run()
    assert list(room.finished)[-3:] == ["runs", "short", "long"]


@given(st.integers(0, 300), st.lists(st.integers(0, 299), max_size=20))
def test_a_step_ranks_a_few_anew_and_all_have_their_turn(num_turns: int, admitted: list[int]) -> None:
    """After a lesson each waiting turn is re-ranked once, in order, at most a fixed number per step."""
    turns = {str(number): _waiting_turn(number in admitted) for number in range(num_turns)}
    ranking, taken = IncrementalRerank(), []
    assert not list(ranking.take(0, turns.values())), "nothing was learned"
    for _ in range(num_turns // RANKED_PER_STEP + 1):
        some = list(ranking.take(1, turns.values()))
        assert len(some) <= RANKED_PER_STEP
        taken += some
    assert taken == [turn for turn in turns.values() if turn.num_cached_tokens is None]
    assert not list(ranking.take(1, turns.values())), "nothing more was learned"


def _waiting_turn(is_admitted: bool) -> Turn:
    job = Job("j", None, 0.0, 0.0, 0.0)
    request = Request("r", [1], SamplingParams(), 0.0)
    request.num_cached_tokens = 0 if is_admitted else None
    return Turn(job, request, 1, None, admitted_s=0.0 if is_admitted else None)


def _mean_completion_s(out: Path, workload: str, *flags: str) -> dict[str, float]:
    """The mean completion time per policy, over all its runs."""
    sums: dict[str, list[float]] = {}
    assert main(["simulate", "--workload", workload, "--json", str(out), *flags]) == 0
    for run in read_results(out).runs:
        assert run.job_completion_s is not None
        sums.setdefault(run.name, []).append(run.job_completion_s.mean)
    return {name: sum(means) / len(means) for name, means in sums.items()}


AGE, FORECAST = "continuum:work_weight=0", "continuum"


@pytest.mark.slow
def test_where_kinds_differ_jobs_are_sooner_done_than_by_age(tmp_path: Path) -> None:
    """With short and long agents and little memory, the mean is at least a tenth lower than by age: enough
    jobs that kinds are learned, over two seeds."""
    flags = ["--rate", "1", "--kv-tokens", "150000", "--block-size", "64", "--share-prefixes", "--jobs", "60"]
    flags += ["--seeds", "2"]
    flags += ["--policies", f"{AGE},{FORECAST}"]
    means = _mean_completion_s(tmp_path / "out.json", "swe-bench+bfcl:tokens=0.1", *flags)
    assert means[FORECAST] < 0.9 * means[AGE]


def test_where_all_are_of_one_kind_the_order_is_that_of_age(tmp_path: Path) -> None:
    """With one kind of job the results equal those by age to the last digit."""
    flags = ["--rate", "1", "--kv-tokens", "30000", "--block-size", "64", "--jobs", "15"]
    flags += ["--policies", f"fcfs,{AGE},{FORECAST}"]
    means = _mean_completion_s(tmp_path / "out.json", "bfcl:tokens=0.1", *flags)
    assert means[FORECAST] == means[AGE] != means["fcfs"]

"""Unnamed jobs are recognized by what their prompts continue, and by nothing less."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.request import RequestStatus
from engine.records.messages import JobFinished
from tests.continuum.job_room import JobRoom
from tracing.events import JobEvent, PrefixCacheEvent, TraceEvent, TraceHeader
from tracing.invariants import all_checks
from tracing.reader import read_trace
from tracing.tracer import Tracer
from tracing.writer import TraceWriter

SYSTEM = [1] * 96
"""A system prompt of six blocks."""


def question(number: int, length: int = 20) -> list[int]:
    """The system prompt and a question that depends on the number."""
    return [*SYSTEM, *(100 + number + i for i in range(length))]


class Recorded:
    """A trace in memory."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def emit(self, event: TraceEvent) -> None:
        self.events.append(event)

    def faults(self) -> list[str]:
        """Violations of the rules of traces."""
        return [fault for check in all_checks() for event in self.events for fault in check.faults(event)]


def test_a_prompt_that_goes_on_from_a_turn_belongs_to_its_job() -> None:
    """Without any id the second turn finds the first one's KV pinned, and the job gets an inferred name."""
    room = JobRoom()
    first = room.turn("r1", question(1), num_replies=0)
    assert first.job_id.startswith("inferred-")
    assert room.read("r1", "ls").pinned_tokens == 128
    room.advance(3)
    second = room.turn("r2", [*room.said("r1"), *[7] * 30], num_replies=1, num_results=1)
    assert (second.job_id, second.turn, second.previous_pin) == (first.job_id, 2, "handed_over")
    assert second.cached_tokens == 128
    assert second.gap_s == pytest.approx(3)
    assert room.num_pins == 1


def test_the_look_into_the_prefix_cache_names_the_job_that_nobody_named() -> None:
    """Trace events of prefix cache lookups name the inferred job, for the first turn and the next."""
    sink = Recorded()
    room = JobRoom(tracer=Tracer(sink))
    job_id = room.turn("r1", question(1), num_replies=0).job_id
    room.read("r1", "ls")
    room.turn("r2", [*room.said("r1"), 7], num_replies=1)
    found = [(event.req_id, event.job_id) for event in sink.events if isinstance(event, PrefixCacheEvent)]
    assert found == [("r1", job_id), ("r2", job_id)]


def test_a_question_that_shares_only_the_system_prompt_is_another_job() -> None:
    """Questions that share only the system prompt, or all but a few tokens, belong to different jobs."""
    room = JobRoom()
    first = room.turn("r1", question(1), num_replies=0)
    room.read("r1", "ls")
    for number, prompt in enumerate(([*question(2), *[7] * 60], [*question(1)[:-10], 9, *[7] * 90])):
        other = room.turn(f"other{number}", prompt, num_replies=1)
        assert (other.turn, other.job_id != first.job_id) == (1, True)


def test_the_same_prompt_from_two_clients_is_two_jobs() -> None:
    """Each continues with its own reply, if the replies differ."""
    room = JobRoom()
    first = room.turn("r1", question(1), num_replies=0)
    second = room.turn("r2", question(1), num_replies=0)
    assert first.job_id != second.job_id
    room.read("r1", "ls")
    room.read("r2", "ls")
    assert room.turn("r2b", [*room.said("r2"), 7], num_replies=1).job_id == second.job_id
    assert room.turn("r1b", [*room.said("r1"), 7], num_replies=1).job_id == first.job_id
    assert room.num_pins == 2


@pytest.mark.parametrize(("tenant", "salt"), [("other", None), ("me", "salt")])
def test_nobody_is_given_the_job_of_another_tenant_or_salt(tenant: str, salt: str | None) -> None:
    """The exact continuation, sent by another tenant or with another salt, begins a separate job."""
    room = JobRoom()
    first = room.turn("r1", question(1), tenant="me", num_replies=0)
    room.read("r1", "ls")
    stranger = room.turn("r2", [*room.said("r1"), 7], tenant=tenant, num_replies=1, cache_salt=salt)
    assert stranger.job_id != first.job_id
    assert room.turn("r3", [*room.said("r1"), 7], tenant="me", num_replies=1).job_id == first.job_id


def test_a_reply_that_is_rendered_anew_is_still_the_same_job() -> None:
    """A reply without its reasoning, as templates render it, still continues the job: with reply counts the
    prompt alone decides."""
    room = JobRoom()
    first = room.turn("r1", question(1), num_replies=0, max_tokens=50)
    room.read("r1", "ls")
    again = [*question(1)[:-4], *[60] * 40]  # The end of the prompt, which opened the reply, is missing too.
    second = room.turn("r2", again, num_replies=1)
    assert second.job_id == first.job_id
    assert (second.diverged_at_token, second.diverged_tokens) == (112, 32)


def test_a_text_that_only_begins_with_anothers_prompt_is_not_its_continuation() -> None:
    """Without reply counts, half of the reply must match token for token."""
    room = JobRoom()
    first = room.turn("r1", question(1), max_tokens=70)
    room.read("r1", "ls")
    stranger = room.turn("r2", [*question(1), *[60] * 90])
    assert stranger.job_id != first.job_id
    assert room.turn("r3", [*room.said("r1")[:-10], *[60] * 20]).job_id == first.job_id


def test_a_single_question_is_not_held() -> None:
    """Once the API server has read that no tool was called, nothing is pinned; until then only for a grace
    period."""
    room = JobRoom()
    receipt = room.turn("r1", question(1), num_replies=0)
    assert (receipt.pinned_tokens, receipt.ttl_s) == (0, 0.0)
    assert room.num_pins == 1
    told = room.read("r1")
    assert (told.pinned_tokens, told.ttl_s, told.reason) == (0, 0.0, "a single question and its answer")
    assert room.num_pins == 0
    assert room.ends() == {"released": 1}
    room.turn("unread", question(2), num_replies=0)
    room.advance(1.01)
    assert room.num_pins == 0


def test_a_question_takes_no_pin_from_a_younger_agent() -> None:
    """If the budget is used up, the question is not pinned at all."""
    room = JobRoom(num_blocks=33, pin_budget=0.4)
    room.ask("old", question(1), num_replies=0, max_tokens=60)
    room.step()
    room.clock.advance(1)
    assert room.turn("agent", [5] * 150, "job", max_tokens=4).pinned_tokens == 144
    assert room.finished["old"].receipt is not None
    assert room.num_pins == 1
    assert room.ends() == {}


def test_questions_push_out_no_job() -> None:
    """After thousands of questions while an agent's tool runs, its next turn still continues its job."""
    room = JobRoom(max_jobs=50)
    agent = room.turn("agent1", question(0), num_replies=0)
    room.read("agent1", "make all")
    for number in range(200):
        room.turn(f"q{number}", question(1000 + 100 * number), num_replies=0, max_tokens=2)
        room.read(f"q{number}")
    assert room.policy.statistics().num_jobs <= 52
    assert room.policy.statistics().num_recognizable <= 52
    assert room.turn("agent2", [*room.said("agent1"), 7], num_replies=1).job_id == agent.job_id


def test_a_chat_with_a_second_question_is_a_job() -> None:
    """From the second question on, a chat is a job, and its turns are pinned as answers are."""
    room = JobRoom()
    first = room.turn("r1", question(1), num_replies=0)
    room.read("r1")
    second = room.turn("r2", [*room.said("r1"), *[7] * 20], num_replies=1)
    assert (second.job_id, second.turn) == (first.job_id, 2)
    assert room.read("r2").ttl_s == 2.0


def test_what_was_inferred_is_adopted_by_the_client_that_names_it() -> None:
    """An unnamed first turn and a named second one form one job, known by that name from then on."""
    trace = Recorded()
    room = JobRoom(tracer=Tracer(trace))
    trace.emit(room.begin_trace(from_start=True))
    first = room.turn("r1", question(1), num_replies=0)
    room.read("r1", "ls")
    second = room.turn("r2", [*room.said("r1"), 7], "mine", num_replies=1)
    assert [turn.turn for turn in room.policy.past_turns("mine", room.clock.now())] == [1, 2]
    assert trace.faults() == []
    assert (second.job_id, second.turn, second.previous_pin) == ("mine", 2, "handed_over")
    assert room.policy.job(first.job_id, room.clock.now()) is None
    stranger = room.turn("r3", [*room.said("r2"), 7], num_replies=2)
    assert stranger.job_id not in ("mine", first.job_id)


def test_a_named_job_is_never_taken_for_another() -> None:
    """Turns with one history and two names stay two jobs, and so does one without a name."""
    room = JobRoom()
    room.turn("r1", question(1), "a", num_replies=0)
    room.read("r1", "ls")
    assert room.turn("b1", [*room.said("r1"), 7], "b", num_replies=1).turn == 1
    assert room.turn("x1", [*room.said("r1"), 8], num_replies=1).turn == 1
    assert room.turn("r2", [*room.said("r1"), 9], "a", num_replies=1).turn == 2


def test_its_inferred_name_finds_a_job_too() -> None:
    """The inferred name in a receipt can be used to continue or finish the job."""
    room = JobRoom()
    first = room.turn("r1", question(1), num_replies=0)
    room.read("r1", "ls")
    assert room.turn("r2", [*room.said("r1"), 7], first.job_id, num_replies=1).turn == 2
    assert room.turn("r3", [*room.said("r2"), 7], num_replies=2).turn == 3
    room.scheduler.signal(JobFinished(first.job_id), room.clock.now())
    assert room.num_pins == 0


@pytest.mark.parametrize("job_id", [None, "a"])
def test_a_retry_after_an_aborted_stream_goes_on_with_the_job(job_id: str | None) -> None:
    """If the client aborts a running or waiting turn and retries, the job continues, and the tool's duration
    is learned once."""
    room = JobRoom()
    first = room.turn("r1", question(1), job_id, num_replies=0)
    room.read("r1", "ls")
    prompt = [*room.said("r1"), *[7] * 20]
    for attempt, steps in (("r2", 0), ("r2-again", 3)):
        room.ask(attempt, prompt, job_id, num_replies=1)
        for _ in range(steps):
            room.step()
        room.scheduler.finish_requests([attempt], RequestStatus.FINISHED_ABORTED, room.clock.now())
        assert room.num_pins == 0
    learned = room.policy.tools.curve(None)
    room.advance(500)
    last = room.turn("r2-at-last", prompt, job_id, num_replies=1)
    assert last.job_id == first.job_id
    assert (learned.num_observations, room.policy.tools.curve(None).num_observations) == (1, 1)
    room.scheduler.check_invariants()


def test_an_aborted_question_is_forgotten() -> None:
    """An aborted question leaves nothing."""
    room = JobRoom()
    room.ask("r1", question(1), num_replies=0)
    room.step()
    room.scheduler.finish_requests(["r1"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    assert room.policy.statistics().num_jobs == 0
    assert room.policy.statistics().num_recognizable == 0


def test_a_request_outside_of_all_jobs_stays_outside() -> None:
    """Requests with no job reference at all (offline use) are not tracked."""
    room = JobRoom()
    room.add("r1", question(1))
    room.run()
    assert room.finished["r1"].receipt is None
    assert room.policy.statistics().num_jobs == 0


def test_inference_can_be_switched_off() -> None:
    """With inference off an unnamed turn has no job."""
    room = JobRoom(infer_jobs=False)
    room.ask("r1", question(1), num_replies=0)
    room.run()
    assert room.finished["r1"].receipt is None
    assert room.num_pins == 0
    assert room.turn("r2", question(1), "named").job_id == "named"


def test_names_are_the_same_when_a_run_is_repeated() -> None:
    """An inferred name depends on the turn alone, so that a trace can be replayed."""
    names = []
    for _ in range(2):
        room = JobRoom()
        names.append(room.turn("r1", question(1)).job_id)
    assert names[0] == names[1]


def test_the_trace_tells_whose_job_it_was_taken_for(tmp_path: Path) -> None:
    """Both turns of an inferred job have the same name in the trace."""
    path = str(tmp_path / "trace.jsonl")
    writer = TraceWriter.open(path)
    writer.emit(TraceHeader(wall_time_s=0.0, monotonic_s=0.0))
    room = JobRoom(tracer=Tracer(writer))
    room.turn("r1", question(1), num_replies=0)
    room.read("r1", "ls")
    name = room.turn("r2", [*room.said("r1"), 7], num_replies=1).job_id
    writer.close()
    events = [event for event in read_trace(path) if isinstance(event, JobEvent)]
    assert {event.job_id for event in events} == {name}
    assert [event.req_id for event in events if event.kind == "turn_arrived"] == ["r1", "r2"]

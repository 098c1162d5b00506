"""Promises of spans of irregular jobs: the real policy on its own clock, without a collector."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from engine.core.request import RequestStatus
from engine.core_process.telemetry import RequestSpans
from engine.records.messages import JobFinished, JobRef
from tests.continuum.job_room import JobRoom
from tests.core.engine_room import CountingGrammar, EngineRoom
from tracing.span_outbox import OutboxLimits
from tracing.telemetry import Telemetry, traces_url
from tracing.tracer import Tracer

PROMPT = [1] * 96
MODEL = "m"
CLOSE_S = 30.0


class Spans(SpanExporter):
    """Keeps the spans that it exports, once it may."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.result = SpanExportResult.SUCCESS

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.may_go_on.wait()
        self.spans += spans
        return self.result

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]


class Observatory:
    """A room with the agent policy, whose spans are kept."""

    def __init__(self, limits: OutboxLimits | None = None, **options: object) -> None:
        self.exporter = Spans()
        self.telemetry = Telemetry(self.exporter, model_name=MODEL, epoch_ns=0, limits=limits)
        self.room = JobRoom(
            tracer=Tracer(self.telemetry),
            on_request_ended=RequestSpans(self.telemetry).request_ended,
            **options,  # type: ignore[arg-type]
        )

    def close(self) -> Spans:
        now = self.room.clock.now()
        self.room.scheduler.close(now)
        self.telemetry.close(now, CLOSE_S)
        return self.exporter


def told(span: ReadableSpan, name: str) -> object:
    assert span.attributes is not None
    return span.attributes[name]


def began_s(span: ReadableSpan) -> float:
    assert span.start_time is not None
    return span.start_time / 1e9


def ended_s(span: ReadableSpan) -> float:
    assert span.end_time is not None
    return span.end_time / 1e9


def test_a_job_that_never_ends_has_its_span_when_it_is_forgotten() -> None:
    """The span ends at the job's last sign of life, or at forgetting if a tool never returned."""
    seen = Observatory(job_idle_s=60.0)
    seen.room.turn("q1", PROMPT, "quiet")
    seen.room.read("q1")
    quiet_s = seen.room.clock.now()
    seen.room.turn("t1", [2] * 96, "at-tool")
    seen.room.read("t1", "sleep 1000")
    seen.room.advance(100)
    forgotten_s = seen.room.clock.now()
    seen.room.turn("o1", [3] * 96, "other")
    jobs = {told(job, "gen_ai.conversation.id"): job for job in seen.close().named("job")}
    assert [told(jobs[name], "continuum.job.outcome") for name in ("quiet", "at-tool", "other")] == [
        "forgotten",
        "forgotten",
        "open",
    ]
    assert ended_s(jobs["quiet"]) == pytest.approx(quiet_s)
    assert ended_s(jobs["at-tool"]) == pytest.approx(forgotten_s)
    (gap,) = seen.exporter.named("tool_gap")
    assert told(gap, "continuum.gap.outcome") == "forgotten"
    assert ended_s(gap) == pytest.approx(forgotten_s)
    assert told(gap, "continuum.pin.outcome") == "expired"


def test_a_job_is_found_by_the_name_it_gets_later() -> None:
    """A first turn without a name and a second with one are one job, whose span has the name."""
    seen = Observatory()
    seen.room.turn("r1", PROMPT, num_replies=0)
    seen.room.read("r1", "ls")
    seen.room.advance(2)
    seen.room.turn("r2", [*seen.room.said("r1"), 7], "mine", num_replies=1, num_results=1)
    spans = seen.close()
    (job,) = spans.named("job")
    assert (told(job, "gen_ai.conversation.id"), told(job, "continuum.job.turns")) == ("mine", 2)
    (gap,) = spans.named("tool_gap")
    assert ended_s(gap) - began_s(gap) == pytest.approx(2)


def test_each_branch_has_its_own_gap() -> None:
    """For two concurrent calls of one job each gap ends with the turn that continues its branch."""
    seen = Observatory()
    for name, token in (("left", 5), ("right", 6)):
        seen.room.turn(name, [*PROMPT, *[token] * 40], "job")
        seen.room.read(name, "make")
    for name, wait_s in (("right", 1), ("left", 4)):
        seen.room.advance(wait_s)
        seen.room.turn(f"{name}2", [*seen.room.said(name), 9], "job")
    gaps = {told(gap, "gen_ai.request.id"): gap for gap in seen.close().named("tool_gap")}
    assert gaps.keys() == {"left", "right"}
    assert ended_s(gaps["right"]) - began_s(gaps["right"]) == pytest.approx(1, abs=0.5)
    assert ended_s(gaps["left"]) - began_s(gaps["left"]) == pytest.approx(5, abs=0.5)
    assert {told(gap, "continuum.gap.outcome") for gap in gaps.values()} == {"returned"}


def test_a_turn_that_is_repeated_is_one_turn_of_the_job() -> None:
    """If a client abandons a turn and repeats it, the turn has two spans."""
    seen = Observatory()
    seen.room.ask("first", PROMPT, "job")
    seen.room.step()
    seen.room.scheduler.finish_requests(["first"], RequestStatus.FINISHED_ABORTED, seen.room.clock.now())
    seen.room.advance(2)
    seen.room.turn("again", PROMPT, "job")
    seen.room.read("again", "make")
    spans = seen.close()
    assert [told(turn, "continuum.turn.number") for turn in spans.named(f"text_completion {MODEL}")] == [1, 1]
    assert [told(gap, "continuum.gap.outcome") for gap in spans.named("tool_gap")] == ["open"]
    (job,) = spans.named("job")
    assert (told(job, "continuum.job.turns"), told(job, "continuum.job.tools_s")) == (1, 0.0)


def test_equal_prompts_that_are_both_answered_are_two_turns() -> None:
    """Sub-agents may have equal prompts: each has its own turn and its own gap."""
    seen = Observatory()
    for request_id in ("first", "second"):
        seen.room.turn(request_id, PROMPT, "job")
        seen.room.read(request_id, "make")
        seen.room.advance(2)
    spans = seen.close()
    assert [told(turn, "continuum.turn.number") for turn in spans.named(f"text_completion {MODEL}")] == [1, 2]
    assert [told(gap, "continuum.gap.outcome") for gap in spans.named("tool_gap")] == ["open", "open"]


def test_a_client_that_leaves_is_no_error_and_its_turn_has_a_span() -> None:
    """The turn has only a queue phase and reason "abort"; its job is not left open."""
    seen = Observatory()
    seen.room.ask("gone", PROMPT)
    seen.room.advance(3)
    now = seen.room.clock.now()
    seen.room.scheduler.finish_requests(["gone"], RequestStatus.FINISHED_ABORTED, now)
    spans = seen.close()
    (turn,) = spans.named(f"text_completion {MODEL}")
    assert told(turn, "gen_ai.response.finish_reasons") == ("abort",)
    assert turn.status.status_code is StatusCode.UNSET
    (queue,) = spans.named("queue")
    assert began_s(queue) == began_s(turn)
    assert ended_s(queue) == pytest.approx(now)
    assert not spans.named("prefill")
    (job,) = spans.named("job")
    assert told(job, "continuum.job.outcome") == "forgotten"


def test_a_turn_that_failed_says_why() -> None:
    """An error's sentence is the status of its span."""
    seen = Observatory()
    request = seen.room.add("bad", PROMPT, awaits_grammar=True, job=JobRef("job"))
    seen.room.scheduler.grammar_compiled(request, CountingGrammar(9, refused_after=2), seen.room.clock.now())
    seen.room.run()
    (turn,) = seen.close().named(f"text_completion {MODEL}")
    assert turn.status.status_code is StatusCode.ERROR
    assert "grammar" in (turn.status.description or "")
    assert told(turn, "error.type") == "error"


def test_a_request_of_no_job_has_a_span_too() -> None:
    """Under a policy without jobs there are only spans of turns."""
    exporter = Spans()
    telemetry = Telemetry(exporter, model_name=MODEL, epoch_ns=0)
    room = EngineRoom(on_request_ended=RequestSpans(telemetry).request_ended)
    room.add("r", [1, 2, 3])
    room.run()
    telemetry.close(room.clock.now(), CLOSE_S)
    assert sorted(span.name for span in exporter.spans) == [
        "decode",
        "prefill",
        "queue",
        f"text_completion {MODEL}",
    ]


@pytest.mark.parametrize(("flags", "num_spans"), [("01", 1), ("00", 0)])
def test_what_the_client_does_not_sample_is_not_sent(flags: str, num_spans: int) -> None:
    """The header's flag decides for the turn and for its whole job."""
    seen = Observatory()
    header = f"00-{'a' * 32}-{'b' * 16}-{flags}"
    seen.room.add("r", PROMPT, job=JobRef("job", traceparent=header))
    seen.room.run()
    seen.room.scheduler.signal(JobFinished("job"), seen.room.clock.now())
    spans = seen.close()
    assert len(spans.named("job")) == len(spans.named(f"text_completion {MODEL}")) == num_spans


def test_a_pin_that_gave_way_is_told_with_its_gap() -> None:
    """The gap goes on without its pin; its span says how and when the pin ended."""
    seen = Observatory(num_blocks=17, ttl_rule="fixed", fixed_ttl_s=900.0, max_ttl_s=900.0, max_wait_s=1.0)
    seen.room.turn("a1", PROMPT, "a")
    seen.room.read("a1", "make")
    seen.room.ask("big", [4] * 236, "b")
    seen.room.advance(40)
    seen.room.run()
    seen.room.turn("a2", [*seen.room.said("a1"), 9], "a")
    (gap,) = seen.close().named("tool_gap")
    assert told(gap, "continuum.pin.outcome") == "revoked"
    assert told(gap, "continuum.pin.held_s") == pytest.approx(40, abs=0.5)
    assert told(gap, "continuum.gap.outcome") == "returned"
    names = [event.name for event in gap.events if event.name != "pin_decided"]
    assert names == ["pin_created", "pin_shrunk", "pin_ended"]  # at first, the end of the prompt was enough


def test_what_finds_no_room_is_counted_and_forgotten() -> None:
    """With the collector stuck, the outbox holds its capacity, and each further span counts once."""
    seen = Observatory(OutboxLimits(capacity=4, batch=2, delay_s=0.01))
    seen.exporter.may_go_on.clear()
    for number in range(8):
        seen.room.turn(f"r{number}", PROMPT, "job")
    num_made = 4 * 8 + 8 + 1  # turns with their phases, gaps with a pin, the job
    closing = threading.Thread(target=seen.close)
    closing.start()
    seen.exporter.may_go_on.set()
    closing.join()
    assert seen.telemetry.take_dropped() == num_made - len(seen.exporter.spans) > 0
    assert seen.telemetry.take_dropped() == 0


def test_what_a_collector_refuses_is_counted() -> None:
    """Each span of a refused batch counts."""
    seen = Observatory()
    seen.exporter.result = SpanExportResult.FAILURE
    seen.room.turn("r", PROMPT, "job")
    seen.close()
    assert seen.telemetry.take_dropped() == len(seen.exporter.spans) == 6


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://collector:4318", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http://collector:4318/v1/traces"),
        ("https://collector/v1/traces", "https://collector/v1/traces"),
        ("https://collector/api/otlp", "https://collector/api/otlp"),
    ],
)
def test_an_address_without_a_path_is_completed(endpoint: str, url: str) -> None:
    """OTLP's path is added to an address without one; another path is kept, as in V1."""
    assert traces_url(endpoint) == url

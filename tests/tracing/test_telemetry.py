"""Promises of --otlp-traces-endpoint: real servers with several API servers, a collector that reads OTLP."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from eval.errors import ServerError
from eval.load.server_process import ServerProcess
from tests.api.server import running_server
from tests.tracing.collector import Collector, ReceivedSpan
from tracing.events import JobEvent, PinEvent
from tracing.reader import read_trace

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "pytest -q tests"}}\n</tool_call>'
CLIENTS_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
PHASES = ("queue", "prefill", "decode")
SLACK_S = 2e-6
"""Times are sent in nanoseconds, but compared as floats since 1970."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model") / "qwen3", max_position_embeddings=2048)


@dataclass(slots=True)
class Agent:
    """A conversation of tool calls, each turn continued with the call's result."""

    url: str
    job_id: str
    replies: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def turn(self, headers: dict[str, str] | None = None, **fields: object) -> dict[str, Any]:
        """Sends a turn; the reply is forced to be the tool call."""
        if not self.messages:
            self.messages = [{"role": "user", "content": f"Job {self.job_id}: the tests fail. " * 8}]
        forced = self._tokens(CALL + "<|im_end|>")
        body = {"messages": self.messages, "tools": TOOLS, "job_id": self.job_id, "replay_token_ids": forced}
        # A new connection, so that any API server may accept it.
        answer = httpx.post(
            f"{self.url}/v1/chat/completions", json={**body, **fields}, headers=headers, timeout=60
        )
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        message = reply["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        self.messages += [message, {"role": "tool", "tool_call_id": call_id, "content": "1 failed"}]
        self.replies.append(reply)
        return reply

    def _tokens(self, text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        tokens: list[int] = httpx.post(f"{self.url}/tokenize", json=body, timeout=60).json()["tokens"]
        return tokens


@dataclass(frozen=True, slots=True)
class Run:
    """Served jobs, and what the collector received of them."""

    collector: Collector
    trace: Path
    named: Agent
    """An agent whose client sent its own spans, and marked the last turn."""
    plain: Agent
    """An agent whose client sent no spans, and finished the job over HTTP."""
    left_open: Agent
    """An agent whose tool still ran when the server stopped."""

    def turns_of(self, agent: Agent) -> list[ReceivedSpan]:
        turns = self.collector.named("chat tiny")
        return [turn for turn in turns if turn.attributes.get("gen_ai.conversation.id") == agent.job_id]

    def gaps_of(self, agent: Agent) -> list[ReceivedSpan]:
        gaps = self.collector.named("tool_gap")
        return [gap for gap in gaps if gap.attributes["gen_ai.conversation.id"] == agent.job_id]

    def job_of(self, agent: Agent) -> ReceivedSpan:
        jobs = self.collector.named("job")
        (job,) = (job for job in jobs if job.attributes["gen_ai.conversation.id"] == agent.job_id)
        return job


def traceparent(number: int) -> str:
    return f"00-{CLIENTS_TRACE}-{number:016x}-01"


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    trace = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    with Collector() as collector:
        flags = ("--num-gpu-blocks-override", "300", "--api-server-count", "2", "--trace", str(trace))
        endpoint = ("--otlp-traces-endpoint", collector.url)
        with running_server(model, *flags, *endpoint, environment=SOON) as server:
            named, plain, left_open = (Agent(server.url, name) for name in ("named", "plain", "left-open"))
            for number in range(3):
                named.turn({"traceparent": traceparent(number + 1)}, is_last_step=number == 2)
                plain.turn()
            httpx.post(f"{server.url}/v1/jobs/plain/finish", timeout=60).raise_for_status()
            left_open.turn({"traceparent": "00-nonsense-01"})
            child = {"prompt": "look", "max_tokens": 2, "job_id": "plain/child", "parent_job_id": "left-open"}
            httpx.post(f"{server.url}/v1/completions", json=child, timeout=60).raise_for_status()
            completion = {"prompt": "once", "max_tokens": 2}
            httpx.post(f"{server.url}/v1/completions", json=completion, timeout=60).raise_for_status()
            assert server.interrupt() == 0
        yield Run(collector, trace, named, plain, left_open)


def test_every_turn_has_one_span_with_the_ids_of_the_trace(run: Run) -> None:
    """Any API server may serve it; its ids lead to the scheduler's trace, and to the client."""
    assert len({span.span_id for span in run.collector.spans}) == len(run.collector.spans)
    ended = [
        event.req_id
        for event in read_trace(run.trace)
        if isinstance(event, JobEvent) and event.kind == "turn_ended"
    ]
    turns = run.collector.named("chat tiny") + run.collector.named("text_completion tiny")
    assert sorted(str(turn.attributes["gen_ai.request.id"]) for turn in turns) == sorted(map(str, ended))
    for agent in (run.named, run.plain, run.left_open):
        ids = [turn.attributes["gen_ai.response.id"] for turn in run.turns_of(agent)]
        assert ids == [reply["id"] for reply in agent.replies]
    assert run.collector.paths == {"/v1/traces"}
    assert {span.service for span in run.collector.spans} == {"continuum"}


def test_a_turn_says_what_it_took(run: Run) -> None:
    """The span has the client's token counts, under the names of the GenAI conventions."""
    for turn, reply in zip(run.turns_of(run.plain), run.plain.replies, strict=True):
        said, usage = turn.attributes, reply["usage"]
        assert turn.kind == "SERVER"
        assert said["gen_ai.operation.name"] == "chat"
        assert said["gen_ai.request.model"] == "tiny"
        assert said["gen_ai.response.finish_reasons"] == ["stop"]
        assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        details = usage["prompt_tokens_details"]
        assert said["gen_ai.usage.cache_read.input_tokens"] == details["cached_tokens"]
        assert said["gen_ai.usage.cache_write.input_tokens"] == details["cache_write_tokens"]
        assert said["continuum.turn.number"] == usage["receipt"]["turn"]
    assert run.turns_of(run.plain)[-1].attributes["gen_ai.usage.cache_read.input_tokens"] > 0


def test_the_documentation_names_every_attribute(run: Run) -> None:
    """docs/observability.md has each attribute of a span and its events."""
    documented = (REPOSITORY / "docs" / "observability.md").read_text()
    said = {name for span in run.collector.spans for name in span.attributes}
    said |= {name for gap in run.collector.named("tool_gap") for e in gap.events.values() for name in e}
    assert len(said) > 30
    assert {name for name in said if f"`{name}`" not in documented} == set()


def test_the_phases_fill_the_turn(run: Run) -> None:
    """Queue, prefill and decode follow each other from the turn's arrival to its end."""
    for turn in run.collector.named("chat tiny"):
        phases = [
            span for name in PHASES for span in run.collector.named(name) if span.parent_id == turn.span_id
        ]
        assert [phase.name for phase in phases] == list(PHASES)
        assert phases[0].began_s == turn.began_s
        assert phases[-1].ended_s == turn.ended_s
        for before, after in pairwise(phases):
            assert before.ended_s == after.began_s
        latency_s = turn.attributes["gen_ai.latency.time_to_first_token"]
        assert phases[0].duration_s + phases[1].duration_s == pytest.approx(latency_s, abs=SLACK_S)


def test_a_client_finds_its_turns_below_its_own_spans(run: Run) -> None:
    """Each turn is a child of the span that its request named; the job is in the same trace, and linked."""
    job, turns = run.job_of(run.named), run.turns_of(run.named)
    assert [turn.parent_id for turn in turns] == [f"{number:016x}" for number in (1, 2, 3)]
    assert [turn.links for turn in turns] == [[job.span_id]] * 3
    assert job.parent_id == turns[0].parent_id
    family = [job, *turns, *run.gaps_of(run.named)]
    assert {span.trace_id for span in family} == {CLIENTS_TRACE}


def test_without_a_clients_span_a_job_is_a_trace_of_its_own(run: Run) -> None:
    """Turns and gaps are the job's children; a header without a span is ignored."""
    for agent in (run.plain, run.left_open):
        job = run.job_of(agent)
        assert job.parent_id == ""
        assert job.trace_id != CLIENTS_TRACE
        for child in (*run.turns_of(agent), *run.gaps_of(agent)):
            assert (child.trace_id, child.parent_id, child.links) == (job.trace_id, job.span_id, [])


def test_a_gap_lies_between_two_turns_and_tells_of_its_pin(run: Run) -> None:
    """The gap is as long as in the receipt, and has the pin's id in the trace and its outcome."""
    created = {
        event.req_id: event.pin_id
        for event in read_trace(run.trace)
        if isinstance(event, PinEvent) and event.kind == "created"
    }
    for agent in (run.named, run.plain):
        turns, gaps = run.turns_of(agent), run.gaps_of(agent)
        for (before, after), gap, reply in zip(pairwise(turns), gaps, agent.replies[1:], strict=False):
            assert gap.began_s == before.ended_s
            assert gap.ended_s == pytest.approx(after.began_s, abs=SLACK_S)
            assert gap.duration_s == pytest.approx(reply["usage"]["receipt"]["gap_s"], abs=SLACK_S)
            said = gap.attributes
            assert said["continuum.gap.outcome"] == "returned"
            assert said["continuum.gap.tools"] == ["bash/pytest/dir"]
            assert said["gen_ai.tool.name"] == "bash"
            assert said["continuum.pin.id"] == created[said["gen_ai.request.id"]]
            assert said["continuum.pin.outcome"] == reply["usage"]["receipt"]["previous_pin"]
            assert "pin_ended" in gap.events
    assert len(run.gaps_of(run.named)) == 2


def test_a_job_lasts_from_its_first_turn_to_its_end(run: Run) -> None:
    """A job's span ends at its end, whoever caused it, or at the server's; it sums up its turns."""
    outcomes = [
        (run.job_of(agent).attributes["continuum.job.outcome"], run.gaps_of(agent)[-1].attributes)
        for agent in (run.named, run.plain, run.left_open)
    ]
    assert [outcome for outcome, _ in outcomes] == ["finished", "finished", "open"]
    assert [gap["continuum.gap.outcome"] for _, gap in outcomes] == ["returned", "finished", "open"]
    for agent in (run.named, run.plain, run.left_open):
        job, turns = run.job_of(agent), run.turns_of(agent)
        assert job.attributes["continuum.job.turns"] == len(turns) == len(agent.replies)
        assert job.began_s == turns[0].began_s
        assert job.ended_s >= max(span.ended_s for span in (*turns, *run.gaps_of(agent)))
        tokens = sum(turn.attributes["gen_ai.usage.input_tokens"] for turn in turns)
        assert job.attributes["gen_ai.usage.input_tokens"] == tokens


@pytest.mark.slow
def test_a_collector_that_hangs_costs_no_request_anything(model: Path, tmp_path: Path) -> None:
    """Requests are answered, lost spans are counted and logged once, and the server stops on request."""
    with socket.create_server(("127.0.0.1", 0)) as never_answers:
        url = f"http://127.0.0.1:{never_answers.getsockname()[1]}"
        environment = {"OTEL_BSP_SCHEDULE_DELAY": "10", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "1"}
        flags = ("--num-gpu-blocks-override", "300", "--otlp-traces-endpoint", url)
        with running_server(model, *flags, log=tmp_path / "log", environment=environment) as server:
            with httpx.Client(base_url=server.url, timeout=60) as http:
                deadline = time.monotonic() + 60
                while dropped(http) == 0 and time.monotonic() < deadline:
                    body = {"prompt": "on and on", "max_tokens": 2, "job_id": "busy"}
                    assert http.post("/v1/completions", json=body).status_code == 200
                assert dropped(http) > 0
            assert server.interrupt() == 0
    assert (tmp_path / "log").read_text().count("Failed to export") == 1


def dropped(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    name = "continuum:telemetry_dropped_total{"
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://", "http://[::1"])
def test_an_endpoint_that_is_no_url_stops_the_start(
    endpoint: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The start fails with one sentence, before anything is loaded."""
    assert main(["serve", str(model), "--otlp-traces-endpoint", endpoint]) == 2
    assert (
        f"must be a URL such as http://localhost:4318/v1/traces, got {endpoint!r}" in capsys.readouterr().err
    )


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["library", "protocol"])
def test_what_cannot_be_sent_stops_the_start(
    missing: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra, or with gRPC in the environment, one sentence says what to do."""
    if missing == "library":
        (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['opentelemetry.sdk'] = None")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        told = "pip install 'continuum-engine[otel]'"
    else:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
        told = "spans are sent as http/protobuf only"
    arguments = [str(model), "--port", "0", "--otlp-traces-endpoint", "http://127.0.0.1:9"]
    with (
        pytest.raises(ServerError, match="exit code 2"),
        ServerProcess(arguments, tmp_path / "log"),
    ):
        pass
    log = (tmp_path / "log").read_text()
    assert told in log
    assert "Traceback" not in log


def test_a_sub_agents_spans_name_it_and_lie_below_its_parents_job(run: Run) -> None:
    said = {"gen_ai.agent.id": "plain/child", "continuum.job.parent": "left-open"}
    seen = [span for span in run.collector.spans if "gen_ai.agent.id" in span.attributes]
    assert {span.name for span in seen} == {"job", "text_completion tiny"}
    assert all(said.items() <= span.attributes.items() for span in seen)
    (job,) = (span for span in seen if span.name == "job")
    above = run.job_of(run.left_open)
    assert (job.trace_id, job.parent_id) == (above.trace_id, above.span_id)

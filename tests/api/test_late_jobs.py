"""A new job that would begin too late is refused at once with 429, and says when to come again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from tests.api.server import Server, running_server
from tests.api.test_service import eventually

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
REJECTIONS = "vllm:admission_rejections_total"
NUM_FIRST, NUM_LATER = 8, 6
WORDS = "one two three four five six seven eight nine ten " * 8
"""Of a prompt that takes most of the pool."""
NUM_TOKENS = 300
KINDS = {
    CHAT: "RateLimitError",
    MESSAGES: "rate_limit_error",
    RESPONSES: "RateLimitError",
}
"""Types of the error in the formats of these APIs."""


@pytest.fixture(scope="module")
def strict(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with memory for one job at a time, on which no new job may be expected to wait; its trace
    replays bit for bit."""
    trace = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    flags = ("--num-gpu-blocks-override=64", "--max-model-len=1000", "--max-first-wait-s=0")
    with running_server(model, *flags, "--trace", str(trace)) as running:
        assert set(flood(running, "first", CHAT)) == {200}, "nothing is known yet: none is refused"
        yield running
        assert running.interrupt() == 0
    assert main(["trace", "replay", str(trace)]) == 0


def body_of(path: str, name: str, *, stream: bool) -> dict[str, Any]:
    """A request that is a job of its own."""
    words = f"{name} {WORDS}"
    ending: dict[str, Any] = {"ignore_eos": True, "stream": stream}
    job: dict[str, Any] = {"job_id": name, "is_last_step": True, **ending}
    if path == RESPONSES:
        return {"input": words, "max_output_tokens": NUM_TOKENS, **job}
    messages = [{"role": "user", "content": words}]
    return {"model": "tiny", "messages": messages, "max_tokens": NUM_TOKENS, **job}


def flood(
    server: Server,
    wave: str,
    path: str,
    *,
    stream: bool = False,
    fields: dict[str, Any] | None = None,
) -> dict[int, list[httpx.Response]]:
    """The answers by status to new jobs, of which the later ones come while others wait and have these
    fields."""
    answers: dict[int, list[httpx.Response]] = {}
    num_all = NUM_FIRST + NUM_LATER
    bodies = [body_of(path, f"{wave}-{path}-{number}", stream=stream) for number in range(num_all)]
    with httpx.Client(base_url=server.url, timeout=120) as http, ThreadPoolExecutor(num_all) as pool:
        asked = [pool.submit(http.post, path, json=body) for body in bodies[:NUM_FIRST]]
        assert eventually(lambda: http.get("/v1/capacity").json()["waiting_jobs"] > 0)
        later = [{**body, **(fields or {})} for body in bodies[NUM_FIRST:]]
        asked += [pool.submit(http.post, path, json=body) for body in later]
        for each in asked:
            answers.setdefault(each.result().status_code, []).append(each.result())
    return answers


def num_refused(server: Server) -> float:
    with httpx.Client(base_url=server.url) as http:
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in http.get("/metrics").text.splitlines()
            if line.startswith(REJECTIONS) and 'reason="begins_too_late"' in line
        )


@pytest.mark.parametrize("path", KINDS)
def test_jobs_that_would_begin_too_late_are_refused_at_once(strict: Server, path: str) -> None:
    """The others are served; the refusal says when to try again, and is counted."""
    before = num_refused(strict)
    answers = flood(strict, "second", path)
    assert set(answers) == {200, 429}
    assert len(answers[429]) >= NUM_LATER
    for answer in answers[429]:
        assert int(answer.headers["Retry-After"]) >= 1
        error = answer.json()["error"]
        assert error["type"] == KINDS[path]
        assert error.get("code", "rate_limit_exceeded") == "rate_limit_exceeded"
        assert "Try again" in error["message"]
    assert num_refused(strict) - before == len(answers[429])


@pytest.mark.parametrize("path", KINDS)
def test_a_stream_is_refused_too(strict: Server, path: str) -> None:
    """By its status, or by an error as its last event if it has begun."""
    before = num_refused(strict)
    answers = flood(strict, "streams", path, stream=True)
    ended = [answer for answer in answers.get(200, ()) if "Try again" in answer.text]
    refused = [*answers.get(429, ()), *ended]
    assert set(answers) <= {200, 429}
    assert NUM_LATER <= len(refused) < NUM_FIRST + NUM_LATER
    assert num_refused(strict) - before == len(refused)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ],
    ids=["several answers", "a grammar"],
)
def test_other_kinds_of_requests_are_refused_too(strict: Server, fields: dict[str, Any]) -> None:
    """Those for several answers, and those that wait for their grammar first."""
    answers = flood(strict, f"other-{next(iter(fields))}", CHAT, fields=fields)
    assert set(answers) == {200, 429}
    assert len(answers[429]) >= NUM_LATER
    assert all(int(answer.headers["Retry-After"]) >= 1 for answer in answers[429])

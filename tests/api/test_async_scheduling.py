"""With async scheduling a server gives the same answers as without; only its trace shows the difference."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from tests.api.server import running_server
from tests.api.test_structured_output import CHAT, COMPLETIONS, HELLO, PERSON, json_schema
from tracing.events import RequestsEnded, StepDecision, StepOutput, TraceHeader
from tracing.reader import read_trace

pytestmark = pytest.mark.slow

GREEDY = {"temperature": 0.0, "max_tokens": 40}
TOOL = {"type": "function", "function": {"name": "note", "parameters": PERSON}}
LONG = [f"{name} said: " + "one two three four " * 45 for name in ("Ann", "Bob", "Cy", "Dee", "Eve")]
"""About 500 tokens each: the pool has space for three."""


@pytest.fixture(scope="module")
def ahead(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a server with async scheduling, a small pool and a host tier. Its trace is checked after it
    stops."""
    trace = tmp_path_factory.mktemp("ahead") / "trace.jsonl"
    flags = ("--async-scheduling", "--num-gpu-blocks-override", "100", "--kv-offloading-size", "0.01")
    with running_server(model, *flags, "--trace", str(trace)) as server:
        with httpx.Client(base_url=server.url, timeout=30) as client:
            yield client
        assert server.interrupt() == 0
    check(trace)


def check(trace: Path) -> None:
    """Checks that the trace replays bit for bit and that results arrived after the next decision."""
    header, *events = read_trace(trace)
    assert isinstance(header, TraceHeader)
    assert header.async_scheduling
    num_late, last = 0, -1
    for event in events:
        last = event.step if isinstance(event, StepDecision) else last
        num_late += isinstance(event, StepOutput) and event.step == last - 1
    assert num_late > 100
    assert sum(sum(e.loads.values()) for e in events if isinstance(e, StepDecision)) > 20
    assert any(isinstance(event, RequestsEnded) and event.how == "aborted" for event in events)
    assert main(["trace", "validate", str(trace)]) == 0
    assert main(["trace", "replay", str(trace)]) == 0


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    for call in choice.get("message", {}).get("tool_calls") or []:
        del call["id"]
    return choice


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (COMPLETIONS, {"prompt": "Once upon a time"}),
    "long": (COMPLETIONS, {"prompt": LONG[0]}),
    "one token": (COMPLETIONS, {"prompt": "Once", "max_tokens": 1}),
    "stop string": (COMPLETIONS, {"prompt": "The end of", "stop": ["e", "a"], "max_tokens": 200}),
    "penalties": (COMPLETIONS, {"prompt": "Again and", "frequency_penalty": 1.5, "repetition_penalty": 1.2}),
    "seeded": (COMPLETIONS, {"prompt": "A die shows", "temperature": 1.0, "seed": 3}),
    "chat": (CHAT, {"messages": HELLO}),
    "schema": (CHAT, {"messages": HELLO, "response_format": json_schema(PERSON), "max_tokens": 300}),
    "tool call": (
        CHAT,
        {"messages": HELLO, "tools": [TOOL], "tool_choice": "required", "max_tokens": 300},
    ),
}


def test_what_it_answers_is_the_same(http: httpx.Client, ahead: httpx.Client) -> None:
    """Concurrent requests to this server get the same answers as sequential ones to the other."""
    bodies = [(path, {"model": "tiny", **GREEDY, **body}) for path, body in REQUESTS.values()]
    with ThreadPoolExecutor(len(bodies)) as threads:
        answers = list(threads.map(lambda each: post(ahead, *each), bodies))
    for name, answer, body in zip(REQUESTS, answers, bodies, strict=True):
        assert answer == post(http, *body), name


def test_a_history_that_left_the_pool_is_loaded_back(ahead: httpx.Client) -> None:
    """A history that was evicted from the pool is loaded back and gives the same answer."""
    bodies = [{"model": "tiny", **GREEDY, "prompt": prompt} for prompt in LONG]
    first = [post(ahead, COMPLETIONS, body) for body in bodies]
    assert [post(ahead, COMPLETIONS, body) for body in bodies] == first


def test_a_client_that_hangs_up_leaves_nothing_behind(ahead: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "For ever", "max_tokens": 900, "ignore_eos": True, "stream": True}
    for _ in range(3):
        with ahead.stream("POST", COMPLETIONS, json=body) as response:
            next(response.iter_lines())
    # The disconnects may still be on their way; the test's time limit bounds the loop.
    while not ahead.post("/reset_prefix_cache").json()["success"]:
        pass
    assert post(ahead, COMPLETIONS, {"model": "tiny", **GREEDY, "prompt": "And"})["finish_reason"]

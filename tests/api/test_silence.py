"""Promises of a stream that waits for its first token: the response begins at once and shows that it is
alive.

Claude Code 2.1 and Codex 0.171 leave a stream after 300 s without an event, and do not count comments and
pings. ``openai`` and the coding agents that use chat wait as long as comments arrive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types import MessageParam

from tests.api.server import Server, running_server
from tests.api.wire import connect, post, read_answer
from tests.processes.support import until
from tracing.events import RequestArrived
from tracing.reader import read_trace

pytestmark = pytest.mark.slow

BEGINS_S, INTERVAL_S = 2.0, 0.1
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("silence") / "trace.jsonl"


@pytest.fixture(scope="module")
def busy(model: Path, trace: Path) -> Iterator[Server]:
    """A server that runs one request at a time."""
    flags = ("--max-num-seqs", "1", "--scheduling-policy", "fcfs", "--num-gpu-blocks-override", "4000")
    interval = ("--sse-keep-alive-interval", str(INTERVAL_S), "--max-model-len", "1024")
    with running_server(model, *flags, *interval, "--trace", str(trace)) as server:
        yield server


@pytest.fixture
def occupied(busy: Server) -> Iterator[str]:
    """The server's address while its only slot is taken."""
    with taken(busy.url):
        yield busy.url


@contextmanager
def taken(url: str) -> Iterator[None]:
    """Takes the server's only slot."""
    endless = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "n": 40, "stream": True}
    with connect(url) as connection:
        connection.sendall(post("/v1/completions", endless))
        assert read_answer(connection, until=b"data: ").status == 200
        yield


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_begins_before_its_first_word(occupied: str, path: str) -> None:
    """Headers arrive within two seconds, for proxies and clients with short timeouts, then keep-alives by the
    flag's interval: comments, or events of the API."""
    with connect(occupied) as connection:
        started = time.monotonic()
        connection.sendall(post(path, {**BODIES[path], "stream": True}))
        assert read_answer(connection, until=b"").status == 200
        assert time.monotonic() - started < BEGINS_S
        sign = b"event: ping" if path == "/v1/messages" else b": keep-alive"
        assert sign in read_rest(connection, sign)


def read_rest(connection: Any, until: bytes) -> bytes:
    data = b""
    while until not in data:
        more = connection.recv(65536)
        assert more, data
        data += more
    return data


def test_a_message_begins_at_once(occupied: str) -> None:
    """A waiting message begins with its prompt's length, then sends pings."""
    body = {**BODIES["/v1/messages"], "stream": True}
    count = httpx.post(f"{occupied}/v1/messages/count_tokens", json={"messages": HELLO}, timeout=30).json()
    with httpx.stream("POST", f"{occupied}/v1/messages", json=body, timeout=30) as response:
        lines = response.iter_lines()
        events = [next(lines) for _ in range(9)]
    assert [line for line in events if line.startswith("event")] == [
        "event: message_start",
        "event: ping",
        "event: ping",
    ]
    usage = json.loads(events[1].removeprefix("data: "))["message"]["usage"]
    assert usage["input_tokens"] == count["input_tokens"]


def test_a_message_that_began_early_is_whole(busy: Server) -> None:
    """The last event has the counts that were unknown at the beginning."""
    with anthropic.Anthropic(base_url=busy.url, api_key="none", max_retries=0, timeout=60) as client:
        with taken(busy.url):
            hello: list[MessageParam] = [{"role": "user", "content": "hello"}]
            stream = client.messages.create(model="tiny", max_tokens=2, messages=hello, stream=True)
            events = iter(stream)
            kinds = [next(events).type]
        kinds += [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_a_waiting_message_has_events_that_add_nothing(busy: Server) -> None:
    """Empty text deltas keep the stream alive; the final message is the same as without them."""
    hello: list[MessageParam] = [{"role": "user", "content": "hello"}]
    with (
        anthropic.Anthropic(base_url=busy.url, api_key="none", max_retries=0, timeout=60) as client,
        ExitStack() as open_streams,
    ):
        greedy = {"temperature": 0}
        ask = partial(client.messages.stream, model="tiny", max_tokens=4, messages=hello, extra_body=greedy)
        with ask() as stream:
            whole = stream.get_final_message()
        with taken(busy.url):
            stream = open_streams.enter_context(ask())
            waiting = [event for event in islice(stream, 4) if event.type == "content_block_delta"]
        late = stream.get_final_message()
    assert [event.delta.text for event in waiting if event.delta.type == "text_delta"] == [""] * len(waiting)
    assert waiting
    assert late.content == whole.content


def test_a_waiting_response_has_events_in_their_order(busy: Server) -> None:
    """The response is created, then in progress repeatedly, with numbered events."""
    with openai.OpenAI(base_url=f"{busy.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        with taken(busy.url):
            stream = iter(client.responses.create(model="tiny", input="hi", max_output_tokens=4, stream=True))
            events = [next(stream) for _ in range(3)]
        events += stream
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.in_progress"]
    assert kinds.count("response.created") == 1
    assert kinds[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_an_error_within_the_first_second_is_a_status(occupied: str) -> None:
    """An invalid request gets a 4xx status, streamed or not."""
    for path, body in BODIES.items():
        answer = httpx.post(f"{occupied}{path}", json={**body, "stream": True, "temperature": -1}, timeout=30)
        assert answer.status_code == 400


@pytest.mark.parametrize("path", BODIES)
def test_the_engine_knows_whose_client_hears_nothing(busy: Server, trace: Path, path: str) -> None:
    """The engine knows which requests are not streamed: ``--max-silent-wait-s`` applies to them."""
    for streams in (True, False):
        body = {**BODIES[path], "stream": streams, "job_id": f"{path} {streams}"}
        assert httpx.post(f"{busy.url}{path}", json=body, timeout=30).status_code == 200

    def arrived() -> dict[str | None, bool]:
        events = [event for event in read_trace(trace) if isinstance(event, RequestArrived)]
        return {event.job_id: event.is_silent for event in events}

    until(lambda: f"{path} False" in arrived())
    assert (arrived()[f"{path} True"], arrived()[f"{path} False"]) == (False, True)

"""Promises of a stream that has nothing to say yet: its answer begins at once, and it shows that it lives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import MessageParam

from tests.api.server import Server, running_server
from tests.api.wire import connect, post, read_answer

pytestmark = pytest.mark.slow

INTERVAL_S = 2.0
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
}


@pytest.fixture(scope="module")
def busy(model: Path) -> Iterator[Server]:
    """A server with one place, and somebody in it who does not leave."""
    flags = ("--max-num-seqs", "1", "--scheduling-policy", "fcfs", "--num-gpu-blocks-override", "4000")
    interval = ("--sse-keep-alive-interval", str(INTERVAL_S), "--max-model-len", "1024")
    with running_server(model, *flags, *interval) as server:
        yield server


@pytest.fixture
def occupied(busy: Server) -> Iterator[str]:
    """Its address while its place is taken."""
    endless = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "n": 40, "stream": True}
    with connect(busy.url) as connection:
        connection.sendall(post("/v1/completions", endless))
        assert read_answer(connection, until=b"data: ").status == 200
        yield busy.url


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_begins_before_its_first_word(occupied: str, path: str) -> None:
    """Proxies and clients with short patience see the headers within a second or two, then signs of life by
    the flag's interval: comments, or what the API has."""
    with connect(occupied) as connection:
        started = time.monotonic()
        connection.sendall(post(path, {**BODIES[path], "stream": True}))
        assert read_answer(connection, until=b"").status == 200
        assert time.monotonic() - started < INTERVAL_S
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
    """Anthropic's clients see that their message has begun, how long its prompt is, then pings."""
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
    """Its last event has the counts that were not known at its beginning."""
    with anthropic.Anthropic(base_url=busy.url, api_key="none", max_retries=0, timeout=60) as client:
        with connect(busy.url) as connection:
            endless = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "n": 40, "stream": True}
            connection.sendall(post("/v1/completions", endless))
            assert read_answer(connection, until=b"data: ").status == 200
            hello: list[MessageParam] = [{"role": "user", "content": "hello"}]
            stream = client.messages.create(model="tiny", max_tokens=2, messages=hello, stream=True)
            events = iter(stream)
            kinds = [next(events).type]
        kinds += [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_an_error_within_the_first_second_is_a_status(occupied: str) -> None:
    """What is wrong with a request is told as before, stream or not."""
    for path, body in BODIES.items():
        answer = httpx.post(f"{occupied}{path}", json={**body, "stream": True, "temperature": -1}, timeout=30)
        assert answer.status_code == 400

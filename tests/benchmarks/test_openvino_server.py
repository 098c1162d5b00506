"""Promises of ``openvino_server.py``: it serves what ``make bench-cpu`` sends, streams tokens as they are
made and explains refusals. It runs in its own process, on a stand-in for the pipeline."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import benchmarks.cpu
from benchmarks.cpu.contender import Contender
from benchmarks.cpu.server import Server
from eval.errors import ServerError
from eval.load.plain_http import Answer, Connection

SCRIPT = Path(benchmarks.cpu.__file__).with_name("openvino_server.py")
STAND_IN = Path(__file__).with_name("openvino_stand_in")
LONG_PROMPT = list(range(300, 400))
"""A prompt whose prefill takes several steps."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """A server that has started and is ready."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    contender = Contender(
        name="OpenVINO",
        command=[sys.executable, str(SCRIPT), "no/model", "--port", str(port)],
        base_url=f"http://127.0.0.1:{port}/v1",
        model_name="tiny",
        ready_path="/health",
        environment={"PYTHONPATH": str(STAND_IN)},
    )
    server = Server(contender, tmp_path)
    try:
        await server.start()
        yield server
    finally:
        server.stop()


async def ask(connection: Connection, **body: Any) -> Answer:
    """Returns the answer to a completion with these fields. Raises ServerError if the server refuses it."""
    return await connection.ask(connection.request("POST", "/v1/completions", json.dumps(body).encode()))


async def test_it_answers_what_the_bench_asks(server: Server) -> None:
    """Concurrent and sequential requests on kept connections get exact lengths; streams work, too."""
    await server.caller.all_at_once([LONG_PROMPT] * 4, 17)
    _, latencies_s = await server.caller.one_after_another([[1]] * 20, num_callers=4)
    assert len(latencies_s) == 20
    assert await server.caller.first_token_s(LONG_PROMPT, 4) > 0


async def test_a_stream_is_an_event_per_token(server: Server) -> None:
    """A stream has one event per token, no half characters, and the usage and text of the whole answer."""
    connection = Connection(server.contender.base_url)
    whole = json.loads((await ask(connection, prompt=LONG_PROMPT, max_tokens=7, ignore_eos=True)).body)
    answer = await ask(connection, prompt=LONG_PROMPT, max_tokens=7, ignore_eos=True, stream=True)
    *events, last = [json.loads(data) for _, data in answer.events()]
    choices = [event["choices"][0] for event in events]
    assert [choice["text"] for choice in choices] == ["n", "", "é", "n", "", "é", "n"]
    assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["length"]
    assert last == {"choices": [], "usage": whole["usage"]}
    assert whole["usage"] == {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107}
    assert whole["choices"][0]["text"] == "nénén"
    assert whole["choices"][0]["finish_reason"] == "length"
    connection.close()


async def test_an_answer_ends_by_itself_unless_told_otherwise(server: Server) -> None:
    """Without ``ignore_eos`` an answer ends with reason "stop"."""
    connection = Connection(server.contender.base_url)
    choice = json.loads((await ask(connection, prompt=[1], max_tokens=7)).body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("né", "stop")
    connection.close()


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ({"prompt": "text"}, "prompt must be a list of token ids"),
        ({"prompt": ["text"]}, "prompt must be a list of token ids"),
        ({"prompt": []}, "Prompt length cannot be 0"),
        ({"prompt": [2**70]}, "too large"),
        ({"prompt": [1], "temperature": 0.5}, "temperature must be 0"),
    ],
)
async def test_what_it_cannot_do_it_refuses(server: Server, body: dict[str, Any], complaint: str) -> None:
    """Unsupported bodies are refused with 400 and the reason; the connection still serves."""
    connection = Connection(server.contender.base_url)
    with pytest.raises(ServerError, match=f"HTTP 400.*{complaint}"):
        await ask(connection, **body)
    assert (await ask(connection, prompt=[1])).complete
    connection.close()


async def test_whoever_leaves_holds_up_nobody(server: Server) -> None:
    """The request of a client that disconnects is cancelled; other clients get their answers."""
    leaving, staying = [Connection(server.contender.base_url) for _ in range(2)]
    endless = asyncio.ensure_future(ask(leaving, prompt=[1], max_tokens=10**9, ignore_eos=True))
    await ask(staying, prompt=[1])
    endless.cancel()
    leaving.close()
    assert (await ask(staying, prompt=[1])).complete
    staying.close()

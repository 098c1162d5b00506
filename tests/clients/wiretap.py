"""A proxy between a client and the server: passes every byte unchanged and records the exchanges."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.clients.weather import NUM_TURNS

BLOCK_SIZE = 16
_HOP_BY_HOP = ("host", "connection", "content-length", "transfer-encoding")
_JOB_FIELDS = ("job_id", "session_id", "vllm_xargs", "conversation")
_JOB_HEADERS = ("x-session-id", "session-id", "session_id", "x-correlation-id", "x-session-affinity")
_GENERATING = ("/chat/completions", "/responses", "/messages")


@dataclass(slots=True)
class Exchange:
    """One request and its answer, as they went over the wire."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    status: int = 0
    content_type: str = ""
    answer: bytearray = field(default_factory=bytearray)

    @property
    def streamed(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    def documents(self) -> list[dict[str, Any]]:
        """The JSON of the answer, or of each event of a stream."""
        text = self.answer.decode()
        if not self.streamed:
            return [json.loads(text)]
        data = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
        return [json.loads(line) for line in data if line != "[DONE]"]

    def receipt(self) -> dict[str, Any]:
        """The job's receipt, from the last ``usage`` that has one."""
        found = [usage["receipt"] for usage in self._usages() if usage.get("receipt")]
        assert found, f"no receipt in {self.documents()[-3:]}"
        receipt = found[-1]
        assert isinstance(receipt, dict)
        return receipt

    def _usages(self) -> Iterator[dict[str, Any]]:
        for document in self.documents():
            for holder in (document, document.get("response") or {}, document.get("message") or {}):
                if isinstance(holder, dict) and holder.get("usage"):
                    yield holder["usage"]


@dataclass(slots=True)
class Wiretap:
    """Records ``exchanges``; ``clear`` starts a new record for each test."""

    url: str
    exchanges: list[Exchange] = field(default_factory=list)

    def clear(self) -> None:
        self.exchanges.clear()

    def turns(self) -> list[Exchange]:
        """The successful exchanges that generated text."""
        return [
            exchange
            for exchange in self.exchanges
            if exchange.path.endswith(_GENERATING) and exchange.status == 200
        ]

    def check_one_kept_job(self, num_turns: int = NUM_TURNS, *, streamed: bool, named: bool = False) -> None:
        """Checks that these were the turns of one job, and each found the one before it.

        The pin of each turn was handed over to the next, which found the whole previous prompt in the cache,
        and nothing was computed twice. No client ``named`` the job.
        """
        turns = self.turns()
        assert [turn.streamed for turn in turns] == [streamed] * num_turns
        for turn in turns:
            assert not turn.body.keys() & set(_JOB_FIELDS)
            assert named or not turn.headers.keys() & set(_JOB_HEADERS)
        check_one_kept_job([turn.receipt() for turn in turns])


def check_one_kept_job(receipts: list[dict[str, Any]]) -> None:
    """Checks one job's receipts: every pin handed over, every prompt cached, nothing computed twice."""
    assert len({receipt["job_id"] for receipt in receipts}) == 1
    assert [receipt["turn"] for receipt in receipts] == list(range(1, len(receipts) + 1))
    assert receipts[0]["prompt_tokens"] > 4 * BLOCK_SIZE
    for before, after in pairwise(receipts):
        assert before["pinned_tokens"] > 0
        assert before["ttl_s"] > 0
        assert after["previous_pin"] == "handed_over"
        assert after["cached_tokens"] >= before["prompt_tokens"] // BLOCK_SIZE * BLOCK_SIZE
        assert after["recomputed_tokens"] == 0


@contextmanager
def tapped(server_url: str) -> Iterator[Wiretap]:
    """Runs a wiretap for this server in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    tap = Wiretap(f"http://127.0.0.1:{listener.getsockname()[1]}")
    forwarder = _Forwarder(tap, server_url)
    route = Route("/{path:path}", forwarder.forward, methods=["GET", "POST", "DELETE"])
    app = Starlette(routes=[route], lifespan=forwarder.lifespan)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield tap
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


class _Forwarder:
    def __init__(self, tap: Wiretap, server_url: str) -> None:
        self._tap = tap
        self._client = httpx.AsyncClient(base_url=server_url, timeout=60)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with self._client:
            yield

    async def forward(self, request: Request) -> StreamingResponse:
        body = await request.body()
        headers = {k: v for k, v in request.headers.items() if k not in _HOP_BY_HOP}
        exchange = Exchange(request.url.path, headers, json.loads(body) if body else {})
        self._tap.exchanges.append(exchange)
        passed_on = self._client.build_request(
            request.method, request.url.path, params=request.query_params, headers=headers, content=body
        )
        answer = await self._client.send(passed_on, stream=True)
        exchange.status = answer.status_code
        exchange.content_type = answer.headers.get("content-type", "")
        kept = {k: v for k, v in answer.headers.items() if k not in _HOP_BY_HOP}
        return StreamingResponse(_remembered(answer, exchange), answer.status_code, kept)


async def _remembered(answer: httpx.Response, exchange: Exchange) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            exchange.answer += chunk
            yield chunk
    finally:
        await answer.aclose()

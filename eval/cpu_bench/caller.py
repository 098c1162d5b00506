"""Asks one server for completions of token ids and times the answers. Knows no cases and no other server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import msgspec

from eval.cpu_bench.connection import Answer, Connection
from eval.errors import UNREADABLE, ServerError

Prompt = Sequence[int]


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Completion(msgspec.Struct):
    usage: _Usage


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []


class Caller:
    """A client with as many connections as it needs; each is kept."""

    def __init__(self, base_url: str, model_name: str) -> None:
        """``base_url`` ends where ``/completions`` begins; ``model_name`` is what requests call the model."""
        self._base_url = base_url
        self._path = urlsplit(base_url).path.rstrip("/")
        self._model_name = model_name
        self._connections: list[Connection] = []

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    async def get(self, path: str) -> None:
        """Raises ServerError unless the server answers with 200, OSError or EOFError if it does not."""
        connection = self._connected(1)[0]
        await connection.ask(connection.request("GET", path))

    async def all_at_once(self, prompts: Sequence[Prompt], num_tokens: int) -> float:
        """Seconds until each of these prompts has been answered with so many tokens."""
        connections = self._connected(len(prompts))
        requests = [self._request(prompt, num_tokens) for prompt in prompts]
        began = time.perf_counter()
        answers = await asyncio.gather(
            *[connection.ask(request) for connection, request in zip(connections, requests, strict=True)]
        )
        took_s = time.perf_counter() - began
        for answer in answers:
            _check_length(answer, num_tokens)
        return took_s

    async def one_after_another(
        self, prompts: Sequence[Prompt], num_callers: int
    ) -> tuple[float, list[float]]:
        """One token for each prompt, by so many callers at a time: seconds of all, and of each."""
        connections = self._connected(num_callers)
        requests = [self._request(prompt, 1) for prompt in prompts]
        latencies_s: list[float] = []
        answers: list[Answer] = []

        async def ask(connection: Connection, share: Sequence[bytes]) -> None:
            for request in share:
                sent = time.perf_counter()
                answers.append(await connection.ask(request))
                latencies_s.append(time.perf_counter() - sent)

        began = time.perf_counter()
        await asyncio.gather(
            *[ask(connection, requests[number::num_callers]) for number, connection in enumerate(connections)]
        )
        took_s = time.perf_counter() - began
        for answer in answers:
            _check_length(answer, 1)
        return took_s, latencies_s

    async def first_token_s(self, prompt: Prompt, num_tokens: int) -> float:
        """Seconds until the first event that holds a choice; the answer is read to its end."""
        connection = self._connected(1)[0]
        request = self._request(prompt, num_tokens, stream=True)
        began = time.perf_counter()
        answer = await connection.ask(request)
        for moment, event in _events(answer):
            if event.choices:
                return moment - began
        raise ServerError("the answer held no choices")

    def _connected(self, count: int) -> list[Connection]:
        while len(self._connections) < count:
            self._connections.append(Connection(self._base_url))
        return self._connections[:count]

    def _request(self, prompt: Prompt, num_tokens: int, *, stream: bool = False) -> bytes:
        body = {
            "model": self._model_name,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }
        return self._connected(1)[0].request("POST", f"{self._path}/completions", msgspec.json.encode(body))


def _check_length(answer: Answer, num_tokens: int) -> None:
    """A server that ends early has done less: its time does not count."""
    try:
        given = msgspec.json.decode(answer.body, type=_Completion).usage.completion_tokens
    except UNREADABLE as error:
        raise ServerError(f"the answer is not in OpenAI's form: {error}") from error
    if given != num_tokens:
        raise ServerError(f"asked for {num_tokens} tokens, it gave {given}")


def _events(answer: Answer) -> Iterator[tuple[float, _Event]]:
    """What a stream held, each event with the time when its last byte came."""
    rest = b""
    for moment, piece in answer.pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                try:
                    yield moment, msgspec.json.decode(data, type=_Event)
                except UNREADABLE as error:
                    raise ServerError(f"an event is not in OpenAI's form: {error}") from error

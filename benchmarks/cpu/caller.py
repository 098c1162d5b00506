"""Requests completions of token ids from one server and times the answers. Knows neither cases nor others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from eval.errors import UNREADABLE, ServerError
from eval.load.plain_http import Answer, Connection

Prompt = Sequence[int]
Sampling = Mapping[str, float]
GREEDY: Sampling = {"temperature": 0}
"""Sampling parameters as a completion's body has them."""
T = TypeVar("T")


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Completion(msgspec.Struct):
    usage: _Usage


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw] = []


class Caller:
    """A client that opens as many connections as it needs and keeps them."""

    def __init__(self, base_url: str, model_name: str) -> None:
        """``base_url`` ends where ``/completions`` begins; ``model_name`` is the model's name in requests."""
        self._base_url = base_url
        self._path = urlsplit(base_url).path.rstrip("/")
        self._model_name = model_name
        self._connections: list[Connection] = []

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    async def get(self, path: str) -> None:
        """Raises ServerError if the status is not 200, OSError or EOFError if no answer arrives."""
        connection = self._connected(1)[0]
        await connection.ask(connection.request("GET", path))

    async def all_at_once(
        self, prompts: Sequence[Prompt], num_tokens: int, sampling: Sampling = GREEDY
    ) -> float:
        """Returns the seconds until each of these prompts has been answered with ``num_tokens`` tokens."""
        connections = self._connected(len(prompts))
        requests = [self._request(prompt, num_tokens, sampling) for prompt in prompts]
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
        """Generates one token per prompt with several callers; returns total seconds and each latency."""
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
        """Returns the seconds until the first event that holds a choice; reads the answer to its end."""
        connection = self._connected(1)[0]
        request = self._request(prompt, num_tokens, stream=True)
        began = time.monotonic()
        answer = await connection.ask(request)
        for moment, data in answer.events():
            if _decoded(data, _Event).choices:
                return moment - began
        raise ServerError("the answer held no choices")

    def _connected(self, count: int) -> list[Connection]:
        while len(self._connections) < count:
            self._connections.append(Connection(self._base_url))
        return self._connections[:count]

    def _request(
        self, prompt: Prompt, num_tokens: int, sampling: Sampling = GREEDY, *, stream: bool = False
    ) -> bytes:
        body = {
            "model": self._model_name,
            "prompt": prompt,
            "max_tokens": num_tokens,
            **sampling,
            "ignore_eos": True,
            "stream": stream,
        }
        return self._connected(1)[0].request("POST", f"{self._path}/completions", msgspec.json.encode(body))


def _check_length(answer: Answer, num_tokens: int) -> None:
    """Raises ServerError for an answer of another length: a server that ends early did less work."""
    given = _decoded(answer.body, _Completion).usage.completion_tokens
    if given != num_tokens:
        raise ServerError(f"asked for {num_tokens} tokens, it gave {given}")


def _decoded(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise ServerError(f"the answer is not in OpenAI's form: {error}") from error

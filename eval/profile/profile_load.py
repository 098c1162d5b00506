"""The requests of a profile measurement: prompts of many lengths on cached contexts, alone and together.

All go over HTTP, as in real use: a step's cost includes what streaming costs the server's processes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import httpx
import msgspec

from eval.errors import UNREADABLE, ServerError
from eval.say import say

CONTEXTS = (32, 256, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
NEW_TOKENS = (8, 48, 192, 768, 1536)
OUTPUT_TOKENS = 12
CHAT_TURNS = 8
"""Turns of one conversation, alone in the server: they measure the overhead around the engine."""
CHAT_WORDS = 60
ROUND_SHARE = 0.2
"""A round that would take more than this share of the whole time is left out."""
FIRST_GUESS_S = 1e-4
"""Seconds per prompt token that are assumed until a round has measured them."""
PROGRESS_S = 5.0
TIMEOUT_S = 600.0
_WORDS = ("alpha", "beta", "gamma", "delta", "run", "test", "file", "error", "line", "value", "the", "of")


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of the server under test."""

    max_model_len: int
    pool_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and the time of its answer, on the clock of the engine's trace."""

    request_id: str
    """Id of the request in the API; the engine's internal id begins with it."""
    sent_s: float
    done_s: float


@dataclass(frozen=True, slots=True)
class Round:
    """Requests sent at once, each with a context that the server has probably cached, and new tokens."""

    batch: int
    context: int
    new: int

    @property
    def num_tokens(self) -> int:
        return self.batch * (self.context + self.new + OUTPUT_TOKENS)


class _Card(msgspec.Struct):
    max_model_len: int


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Chunk(msgspec.Struct):
    id: str = ""
    error: dict[str, Any] | None = None


class ProfileLoad:
    """Drives one server. Use it as a context manager."""

    def __init__(self, base_url: str, seed: int) -> None:
        self._http = httpx.AsyncClient(base_url=base_url, timeout=TIMEOUT_S, trust_env=False)
        self._seed = seed
        self._vocabulary: list[int] = []
        self._chunks = msgspec.json.Decoder(_Chunk)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def max_model_len(self) -> int:
        """Returns the longest prompt plus output that the server accepts."""
        response = await self._http.get("/v1/models")
        return msgspec.json.decode(response.content, type=_Cards).data[0].max_model_len

    async def run(self, limits: ServerLimits, seconds: float) -> list[Exchange]:
        """Loads the server for about ``seconds``; returns the exchanges during which no other was served."""
        try:
            answer = await self._http.post("/tokenize", json={"prompt": " ".join(_WORDS)})
            self._vocabulary = sorted(set(answer.raise_for_status().json()["tokens"]))
            await self._play(Round(1, 32, 8), 0)  # triggers the server's one-time work
            alone = await self._converse(limits)
            await self._play_rounds(limits, seconds)
            return alone + await self._converse(limits)
        except (httpx.HTTPError, *UNREADABLE, KeyError) as error:
            raise ServerError(
                f"The server under test failed: {str(error) or type(error).__name__}."
            ) from error

    async def _play_rounds(self, limits: ServerLimits, seconds: float) -> None:
        """Runs all rounds, small ones first, then again in random orders, until the time is over."""
        rng = random.Random(f"rounds {self._seed}")
        rounds = sorted(all_rounds(limits), key=lambda one: one.num_tokens)
        started = told = time.monotonic()
        token_s = FIRST_GUESS_S
        number = 0
        while True:
            for one in rounds:
                begun = time.monotonic()
                if begun - started > seconds:
                    return
                if one.num_tokens * token_s > seconds * ROUND_SHARE:
                    continue
                await self._play(one, number)
                number += 1
                token_s = max(0.5 * token_s, (time.monotonic() - begun) / one.num_tokens)
                if time.monotonic() - told > PROGRESS_S:
                    told = time.monotonic()
                    say(f"profile: {told - started:.0f} of {seconds:.0f} s, {number} rounds")
            rng.shuffle(rounds)

    async def _play(self, one: Round, number: int) -> None:
        prompts = [
            self._tokens(f"context {one.context} {index}", one.context)
            + self._tokens(f"new {number} {index}", one.new)
            for index in range(one.batch)
        ]
        await asyncio.gather(*(self._complete(prompt) for prompt in prompts))

    def _tokens(self, purpose: str, count: int) -> list[int]:
        return random.Random(f"{purpose} {self._seed}").choices(self._vocabulary, k=count)

    async def _complete(self, prompt: list[int]) -> None:
        await self._exchange("/v1/completions", {"prompt": prompt, "max_tokens": OUTPUT_TOKENS})

    async def _converse(self, limits: ServerLimits) -> list[Exchange]:
        """Holds a conversation like an agent's, each turn with the whole history."""
        rng = random.Random(f"words {self._seed}")
        messages: list[dict[str, str]] = []
        exchanges = []
        words = min(CHAT_WORDS, limits.max_model_len // (8 * CHAT_TURNS))
        for _ in range(CHAT_TURNS):
            messages.append({"role": "user", "content": " ".join(rng.choices(_WORDS, k=max(1, words)))})
            body = {"messages": messages, "max_tokens": 4}
            exchanges.append(await self._exchange("/v1/chat/completions", body))
            messages.append({"role": "assistant", "content": " ".join(rng.choices(_WORDS, k=3))})
        return exchanges

    async def _exchange(self, path: str, body: dict[str, Any]) -> Exchange:
        """Streams one answer to its end."""
        body = {**body, "temperature": 0.0, "ignore_eos": True, "stream": True}
        sent_s = time.monotonic()
        request_id = ""
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread())[:200].decode(errors="replace")
                raise ServerError(
                    f"The server under test refused a request: HTTP {response.status_code}: {text}"
                )
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    break
                if line:
                    request_id = self._read_chunk(line) or request_id
        return Exchange(request_id, sent_s, time.monotonic())

    def _read_chunk(self, line: str) -> str:
        """Parses a chunk as a client does; returns its id."""
        chunk = self._chunks.decode(line.removeprefix("data: "))
        if chunk.error is not None:
            raise ServerError(f"The server under test failed in an answer: {chunk.error.get('message')}")
        return chunk.id


def all_rounds(limits: ServerLimits) -> Iterator[Round]:
    """Yields every combination that fits."""
    for context in CONTEXTS:
        for batch in BATCHES:
            if batch > limits.max_num_seqs:
                continue
            for new in NEW_TOKENS:
                longest = context + new + OUTPUT_TOKENS
                # Twice: contexts of other rounds stay cached as well.
                if longest < limits.max_model_len and 2 * batch * longest < limits.pool_tokens:
                    yield Round(batch, context, new)

"""Talks to an OpenAI-compatible server as an agent would, and times it. Knows nothing of jobs or workloads.

Works against servers that know no job fields: those ignore them.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import httpx
import msgspec

from engine.messages import TurnReceipt
from eval.errors import ServerError
from eval.server_metrics import ServerMetrics

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
Message = dict[str, str]
"""``role`` and ``content``, as the API has them."""


class TurnFailedError(Exception):
    """One request went wrong; the server may still be well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a streamed answer said and how long it took."""

    text: str
    finish_reason: str | None
    ttft_s: float
    """From sending the request to the first chunk with a choice."""
    latency_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    receipt: TurnReceipt | None


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The model behind a server."""

    model: str
    max_model_len: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One turn to send."""

    messages: list[Message]
    replay_token_ids: list[int]
    job_id: str | None
    is_last_step: bool


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Error(msgspec.Struct):
    message: str = "an error without a message"


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    receipt: TurnReceipt | None = None
    error: _Error | None = None


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


_CHUNK = msgspec.json.Decoder(_Chunk)


class ServerClient:
    """An async client of one server; use it as a context manager."""

    def __init__(self, base_url: str, *, model: str | None = None, timeout_s: float = 600.0) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def connect(self) -> ServerInfo:
        """Find out what is served; the model named at construction must be among it."""
        cards = (await self._call("GET", "/v1/models", None, _Cards)).data
        chosen = [card for card in cards if not self.model or card.id == self.model]
        if not chosen:
            served = ", ".join(card.id for card in cards) or "nothing"
            raise ServerError(f"The server at {self.base_url} does not serve {self.model!r} but {served}.")
        self.model = chosen[0].id
        return ServerInfo(self.model, chosen[0].max_model_len)

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text alone, no special tokens added."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return (await self._call("POST", "/tokenize", body, _Tokens)).tokens

    async def tokenize_messages(self, messages: list[Message], add_generation_prompt: bool) -> list[int]:
        """Token ids of a conversation as the server's chat template writes it."""
        body = {"model": self.model, "messages": messages, "add_generation_prompt": add_generation_prompt}
        return (await self._call("POST", "/tokenize", body, _Tokens)).tokens

    async def detokenize(self, token_ids: list[int]) -> str:
        body = {"model": self.model, "tokens": token_ids}
        return (await self._call("POST", "/detokenize", body, _Text)).prompt

    async def metrics(self) -> ServerMetrics:
        """The server's counters and gauges now; all unknown if it has none to show, or is gone."""
        try:
            response = await self._http.get("/metrics")
        except httpx.HTTPError:
            return ServerMetrics.parse("")
        return ServerMetrics.parse(response.text if response.status_code == httpx.codes.OK else "")

    async def chat(self, turn: TurnRequest) -> Reply:
        """Send one turn and read its streamed answer to the end."""
        body = self._chat_body(turn)
        started = time.perf_counter()
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise TurnFailedError(_http_error(response.status_code, await response.aread()))
                return await read_reply(response.aiter_lines(), started)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise TurnFailedError(_reason(error)) from error

    def _chat_body(self, turn: TurnRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": turn.messages,
            "max_tokens": len(turn.replay_token_ids),
            "temperature": 0.0,
            "replay_token_ids": turn.replay_token_ids,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if turn.job_id is not None:
            body |= {"job_id": turn.job_id, "is_last_step": turn.is_last_step}
        return body

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, kind: type[T]) -> T:
        try:
            response = await self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"Cannot reach the server at {self.base_url}: {_reason(error)}.") from error
        if response.status_code != httpx.codes.OK:
            reason = _http_error(response.status_code, response.content)
            raise ServerError(f"{self.base_url}{path} answered: {reason}")
        try:
            return msgspec.json.decode(response.content, type=kind)
        except msgspec.DecodeError as error:
            raise ServerError(
                f"{self.base_url}{path} answered something else than expected: {error}."
            ) from error


async def read_reply(lines: AsyncIterator[str], started: float) -> Reply:
    """Follow a stream of server-sent events to its ``[DONE]``."""
    parts: list[str] = []
    ttft_s: float | None = None
    finish_reason: str | None = None
    usage = _Usage()
    receipt: TurnReceipt | None = None
    async for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            break
        chunk = _CHUNK.decode(line[len("data: ") :])
        if chunk.error is not None:
            raise TurnFailedError(chunk.error.message)
        for choice in chunk.choices:
            ttft_s = ttft_s if ttft_s is not None else time.perf_counter() - started
            parts.append(choice.delta.content or "")
            finish_reason = choice.finish_reason or finish_reason
        usage = chunk.usage or usage
        receipt = chunk.receipt or receipt
    else:
        raise TurnFailedError("the stream ended before [DONE]")
    if ttft_s is None:
        raise TurnFailedError("the answer held no choices")
    details = usage.prompt_tokens_details
    return Reply(
        text="".join(parts),
        finish_reason=finish_reason,
        ttft_s=ttft_s,
        latency_s=time.perf_counter() - started,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        output_tokens=usage.completion_tokens,
        receipt=receipt,
    )


def _http_error(status: int, content: bytes) -> str:
    """The server's own words where it has the OpenAI error shape, else the start of what it sent."""
    try:
        error = msgspec.json.decode(content, type=_Chunk).error
    except msgspec.DecodeError:
        error = None
    return f"HTTP {status}: {error.message if error else content[:200].decode(errors='replace')}"


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__

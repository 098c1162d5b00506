"""A timed client of an OpenAI-compatible server, which acts like an agent. Knows nothing of workloads.

The server type decides which extensions are sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import httpx
import msgspec

from engine.records.messages import TurnReceipt
from eval.errors import UNREADABLE, ServerError, ServerGoneError
from eval.load.server_metrics import ServerMetrics
from eval.load.server_type import Identity, Message, ServerType, TurnRequest, server_type_of
from eval.load.stream_chunk import ChunkError, ChunkUsage

T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 60.0
"""Timeout of everything but a response: model list, tokenization, metrics."""
TIMEOUT_S = 3600.0
"""Longest silence within one response. A server that is short of memory may let a turn wait for minutes; a
client that gives up early would measure itself instead of the server."""
MAX_PORT = 65535
BUSY = frozenset({httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS})
BUSY_WAIT_S = 1.0
"""Seconds until a retry if a busy server sends no Retry-After."""
MAX_BUSY_WAIT_S = 60.0


class TurnFailedError(Exception):
    """One request failed; the server may still be healthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A streamed response and its timing."""

    text: str
    token_ids: list[int] | None = None
    """The output's token ids; None where the server does not return them."""
    finish_reason: str | None
    ttft_s: float
    """Time from sending the request to the first chunk with output of the model: text, reasoning
    or a call. For an empty response, to its end."""
    latency_s: float
    prompt_tokens: int
    cached_tokens: int | None
    """Cached tokens of the prompt; None where the server does not report them."""
    output_tokens: int
    receipt: TurnReceipt | None


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The model of a server, and the extensions that the server takes."""

    model: str
    max_model_len: int | None
    server_type: ServerType


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """Reasoning; servers use either name."""
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    @property
    def has_content(self) -> bool:
        """Whether there is output: a server may send an empty first chunk before it computes anything."""
        texts = self.content or self.reasoning or self.reasoning_content or self.refusal
        return bool(texts or self.tool_calls or self.function_call)


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    """The delta of a chat completion."""
    text: str | None = None
    """The text of a completion."""
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def has_content(self) -> bool:
        said = self.text or self.token_ids or self.finish_reason
        return bool(said) or (self.delta is not None and self.delta.has_content)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: ChunkUsage | None = None
    error: ChunkError | None = None


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    owned_by: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Text(msgspec.Struct):
    prompt: str


_CHUNK = msgspec.json.Decoder(_Chunk)


class ServerClient:
    """An async client of one server; use it as a context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        timeout_s: float = TIMEOUT_S,
        api_key: str | None = None,
        extra_body: dict[str, Any] | None = None,
        retry_busy: bool = False,
    ) -> None:
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ServerError("The API key has a character that an HTTP header cannot contain.")
        self.base_url = _checked(base_url).rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self._timeout_s = timeout_s
        self._call_timeout = httpx.Timeout(min(timeout_s, CALL_TIMEOUT_S), connect=CONNECT_TIMEOUT_S)
        self._extra_body = extra_body or {}
        self._retry_busy = retry_busy
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=60.0),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def connect(self) -> ServerInfo:
        """Reads the model list, which must include the model named at construction."""
        cards = (await self._call("GET", "/v1/models", None, _Cards)).data
        if not cards:
            raise ServerError(f"The server at {self.base_url} serves no model.")
        chosen = [card for card in cards if not self.model or card.id == self.model]
        if not chosen:
            served = ", ".join(card.id for card in cards)
            raise ServerError(f"The server at {self.base_url} does not serve {self.model!r} but {served}.")
        self.model = chosen[0].id
        return ServerInfo(self.model, chosen[0].max_model_len, server_type_of(chosen[0].owned_by))

    async def can_tokenize(self, *, chat: bool = False) -> bool:
        """Whether the server has /tokenize (with ``chat``: for whole conversations)."""
        try:
            if chat:
                await self.tokenize_messages([{"role": "user", "content": "a"}], add_generation_prompt=True)
            else:
                await self.tokenize("a")
        except ServerGoneError:
            raise
        except ServerError:
            return False
        return True

    async def tokenize(self, text: str) -> list[int]:
        """Token ids of a text without special tokens."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        return (await self._call("POST", "/tokenize", body, _Tokens)).tokens

    async def tokenize_messages(self, messages: list[Message], add_generation_prompt: bool) -> list[int]:
        """Token ids of a conversation rendered by the server's chat template."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        return (await self._call("POST", "/tokenize", body, _Tokens)).tokens

    async def detokenize(self, token_ids: list[int]) -> str:
        body = {"model": self.model, "tokens": token_ids}
        return (await self._call("POST", "/detokenize", body, _Text)).prompt

    async def reset_prefix_cache(self) -> None:
        """Reset the server's prefix cache. Raises ServerError if it cannot."""
        try:
            response = await self._http.post("/reset_prefix_cache")
        except httpx.HTTPError as error:
            raise ServerGoneError(f"Cannot reach the server at {self.base_url}: {_reason(error)}.") from error
        if response.status_code != httpx.codes.OK:
            reason = _http_error(response.status_code, response.content)
            raise ServerError(f"The server at {self.base_url} does not reset its prefix cache: {reason}.")

    async def metrics(self) -> ServerMetrics:
        """The server's counters and gauges now; all unknown if it has none, or is gone."""
        try:
            response = await self._http.get("/metrics", timeout=CONNECT_TIMEOUT_S)
            return ServerMetrics.parse(response.text if response.status_code == httpx.codes.OK else "")
        except (httpx.HTTPError, ValueError):  # a page that is not metrics raises ValueError
            return ServerMetrics.parse("")

    async def send(self, turn: TurnRequest, server_type: ServerType, identity: Identity) -> Reply:
        """Send one turn and read its streamed response to the end.

        Raises TurnFailedError, and ServerGoneError if nothing listens any more. Nothing is sent twice, except
        with ``retry_busy`` a turn that a busy server refused; that wait counts as latency.
        """
        path = "/v1/chat/completions" if turn.is_chat else "/v1/completions"
        content = msgspec.json.encode(server_type.body(self.model, turn, identity) | self._extra_body)
        headers = {"Content-Type": "application/json"} | server_type.headers(turn, identity)
        started = time.perf_counter()
        while True:
            try:
                async with self._http.stream("POST", path, content=content, headers=headers) as response:
                    if response.status_code == httpx.codes.OK:
                        return await read_reply(_lines(response.aiter_bytes()), started)
                    complaint = _http_error(response.status_code, await response.aread())
            except httpx.HTTPError as error:
                await self._check_alive()
                raise TurnFailedError(self._reason(error)) from error
            except UNREADABLE as error:
                raise TurnFailedError(f"the response is not in OpenAI's format: {error}") from error
            if not self._retry_busy or response.status_code not in BUSY:
                raise TurnFailedError(complaint)
            await asyncio.sleep(_retry_after_s(response.headers.get("Retry-After")))

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Send a request and yield the data of each server-sent event of its response as it arrives.

        Raises as ``send`` does. Close the generator if it is left early, and the server aborts the request.
        """
        content = msgspec.json.encode(body | self._extra_body)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.stream("POST", path, content=content, headers=headers) as response:
                if response.status_code != httpx.codes.OK:
                    raise TurnFailedError(_http_error(response.status_code, await response.aread()))
                async for line in _lines(response.aiter_bytes()):
                    if line.startswith(b"data:"):
                        yield line[len(b"data:") :].strip()
        except httpx.HTTPError as error:
            await self._check_alive()
            raise TurnFailedError(self._reason(error)) from error

    async def _check_alive(self) -> None:
        """Requests the server's health after a broken connection. Raises ServerGoneError."""
        try:
            response = await self._http.get("/health", timeout=CONNECT_TIMEOUT_S)
        except httpx.TimeoutException:
            return  # busy, but alive
        except httpx.HTTPError as error:
            raise ServerGoneError(f"The server at {self.base_url} is gone: {_reason(error)}.") from error
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise ServerGoneError(f"The server at {self.base_url} says that its engine is dead.")

    def _reason(self, error: httpx.HTTPError) -> str:
        if isinstance(error, httpx.ReadTimeout):
            return f"the server sent nothing for {self._timeout_s:g} s"
        return _reason(error)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, kind: type[T]) -> T:
        try:
            response = await self._http.request(method, path, json=body, timeout=self._call_timeout)
        except httpx.HTTPError as error:
            raise ServerGoneError(f"Cannot reach the server at {self.base_url}: {_reason(error)}.") from error
        if response.status_code != httpx.codes.OK:
            reason = _http_error(response.status_code, response.content)
            raise ServerError(f"{self.base_url}{path} answered: {reason}")
        try:
            return msgspec.json.decode(response.content, type=kind)
        except UNREADABLE as error:
            raise ServerError(f"Unexpected response from {self.base_url}{path}: {error}.") from error


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yields lines of an event stream; splits at newlines only, unlike str.splitlines."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r")
    if rest:
        yield rest


async def read_reply(lines: AsyncIterator[bytes], started: float) -> Reply:
    """Read a stream of server-sent events past its ``[DONE]``, so that the connection can be reused."""
    reader = _ReplyReader(started)
    async for line in lines:
        if line.startswith(b"data:"):
            reader.read(line[len(b"data:") :].strip())
    return reader.reply()


class _ReplyReader:
    """Assembles the chunks of one response."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._parts: list[str] = []
        self._token_ids: list[int] = []
        self._has_choices = False
        self._ttft_s: float | None = None
        self._latency_s: float | None = None
        self._finish_reason: str | None = None
        self._usage = ChunkUsage()

    def read(self, event: bytes) -> None:
        if event == b"[DONE]":
            self._latency_s = time.perf_counter() - self._started
            return
        chunk = _CHUNK.decode(event)
        if chunk.error is not None:
            raise TurnFailedError(chunk.error.message)
        for choice in chunk.choices:
            self._take(choice)
        self._usage = chunk.usage or self._usage

    def _take(self, choice: _Choice) -> None:
        self._has_choices = True
        if self._ttft_s is None and choice.has_content:
            self._ttft_s = time.perf_counter() - self._started
        self._parts.append((choice.delta.content if choice.delta else choice.text) or "")
        self._token_ids.extend(choice.token_ids or ())
        self._finish_reason = choice.finish_reason or self._finish_reason

    def reply(self) -> Reply:
        if self._latency_s is None:
            raise TurnFailedError("the stream ended before [DONE]")
        if not self._has_choices:
            raise TurnFailedError("the response has no choices")
        details = self._usage.prompt_tokens_details
        return Reply(
            text="".join(self._parts),
            token_ids=self._token_ids or None,
            finish_reason=self._finish_reason,
            ttft_s=self._latency_s if self._ttft_s is None else self._ttft_s,
            latency_s=self._latency_s,
            prompt_tokens=self._usage.prompt_tokens,
            cached_tokens=details.cached_tokens if details else None,
            output_tokens=self._usage.completion_tokens,
            receipt=self._usage.receipt,
        )


def _checked(base_url: str) -> str:
    """Returns the address; raises ServerError if it is not a valid one."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ServerError(f"{base_url!r} is not the address of a server: {error}.") from error
    if url.scheme not in ("http", "https") or not url.host or (url.port or 1) > MAX_PORT:
        raise ServerError(f"{base_url!r} is not the address of a server, such as http://127.0.0.1:8000.")
    return base_url


def _retry_after_s(header: str | None) -> float:
    """Returns the seconds of a Retry-After header; ignores a date in it."""
    try:
        return min(max(0.0, float(header or BUSY_WAIT_S)), MAX_BUSY_WAIT_S)
    except ValueError:
        return BUSY_WAIT_S


def _http_error(status: int, content: bytes) -> str:
    """Returns the message of an OpenAI error, else the start of the body."""
    try:
        error = msgspec.json.decode(content, type=_Chunk).error
    except UNREADABLE:
        error = None
    return f"HTTP {status}: {error.message if error else content[:200].decode(errors='replace')}"


def _reason(error: Exception) -> str:
    if isinstance(error, httpx.ReadTimeout):
        return "it does not respond"
    return str(error).rstrip(".") or type(error).__name__

"""A model served over OpenAI's chat completions, streamed over plain HTTP: needs no client library."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from eval.agents.model import Message, ModelReply, OnText, ReplyBuilder, Sampling, Schema
from eval.errors import UNREADABLE
from eval.load.client import ServerClient, TurnFailedError
from eval.load.stream_chunk import ChunkError, ChunkUsage

PATH = "/v1/chat/completions"


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function = msgspec.field(default_factory=_Function)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: ChunkUsage | None = None
    error: ChunkError | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


class HttpModel:
    """The model that ``client`` is connected to."""

    def __init__(self, client: ServerClient, sampling: Sampling) -> None:
        self._client = client
        self._sampling = sampling

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Schema], job_id: str | None, on_text: OnText
    ) -> ModelReply:
        builder = ReplyBuilder(on_text)
        done = False
        async with aclosing(self._client.events(PATH, self._body(messages, tools, job_id))) as events:
            async for event in events:
                if event == b"[DONE]":
                    done = True
                else:
                    _take(builder, _decoded(event))
        if not done:
            raise TurnFailedError("the stream ended before [DONE]")
        return builder.reply()

    def _body(
        self, messages: Sequence[Message], tools: Sequence[Schema], job_id: str | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._client.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._sampling.fields(),
        }
        if tools:
            body["tools"] = tools
        if job_id is not None:
            body["job_id"] = job_id
        return body


def _decoded(event: bytes) -> _Chunk:
    try:
        chunk = _CHUNK.decode(event)
    except UNREADABLE as error:
        raise TurnFailedError(f"the response is not in OpenAI's format: {error}") from error
    if chunk.error is not None:
        raise TurnFailedError(chunk.error.message)
    return chunk


def _take(builder: ReplyBuilder, chunk: _Chunk) -> None:
    for choice in chunk.choices:
        builder.begin()
        builder.finish_reason = choice.finish_reason or builder.finish_reason
        delta = choice.delta
        if reasoning := delta.reasoning or delta.reasoning_content:
            builder.add_reasoning(reasoning)
        if delta.content:
            builder.add_text(delta.content)
        for call in delta.tool_calls or ():
            builder.add_call(call.index, call.id, call.function.name, call.function.arguments)
    if chunk.usage is not None:
        _take_usage(builder, chunk.usage)


def _take_usage(builder: ReplyBuilder, usage: ChunkUsage) -> None:
    builder.prompt_tokens = usage.prompt_tokens
    builder.output_tokens = usage.completion_tokens
    builder.cached_tokens = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
    builder.receipt = usage.receipt

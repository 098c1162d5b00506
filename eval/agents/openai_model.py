"""A model called through the OpenAI client library, which most agents use. Needs the extra ``clients``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from engine.records.messages import TurnReceipt
from eval.agents.model import Message, ModelReply, OnText, ReplyBuilder, Sampling, Schema
from eval.errors import EvalError, ServerGoneError
from eval.load.client import TIMEOUT_S, TurnFailedError

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types import CompletionUsage
    from openai.types.chat import ChatCompletionChunk


def open_client(base_url: str, api_key: str | None = None) -> AsyncOpenAI:
    """Returns the library's client of a server; raises EvalError if the library is not installed."""
    try:
        from openai import AsyncOpenAI
    except ImportError as error:
        raise EvalError(
            'The evaluation needs the OpenAI client library: pip install "continuum-engine[clients]".'
        ) from error
    address = base_url.rstrip("/").removesuffix("/v1")
    return AsyncOpenAI(base_url=f"{address}/v1", api_key=api_key or "none", max_retries=0, timeout=TIMEOUT_S)


class OpenAIModel:
    """One model of the server that ``client`` is connected to."""

    def __init__(self, client: AsyncOpenAI, model: str, sampling: Sampling) -> None:
        self._client = client
        self._model = model
        self._sampling = sampling

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[Schema], job_id: str | None, on_text: OnText
    ) -> ModelReply:
        import openai

        builder = ReplyBuilder(on_text)
        said: list[Any] = list(messages)
        given: dict[str, Any] = dict(self._sampling.fields())
        if tools:
            given["tools"] = list(tools)
        if job_id is not None:
            given["extra_body"] = {"job_id": job_id}
        try:
            stream = await self._client.chat.completions.create(
                model=self._model,
                messages=said,
                stream=True,
                stream_options={"include_usage": True},
                **given,
            )
            async with stream:
                async for chunk in stream:
                    _take(builder, chunk)
        except openai.APIConnectionError as error:
            raise ServerGoneError(f"Cannot reach the server at {self._client.base_url}: {error}") from error
        except openai.APIError as error:
            raise TurnFailedError(error.message) from error
        return builder.reply()


def _take(builder: ReplyBuilder, chunk: ChatCompletionChunk) -> None:
    for choice in chunk.choices:
        builder.begin()
        builder.finish_reason = choice.finish_reason or builder.finish_reason
        if choice.delta.content:
            builder.add_text(choice.delta.content)
        for call in choice.delta.tool_calls or ():
            name, arguments = (call.function.name, call.function.arguments) if call.function else (None, None)
            builder.add_call(call.index, call.id, name, arguments)
    if chunk.usage is not None:
        _take_usage(builder, chunk.usage)


def _take_usage(builder: ReplyBuilder, usage: CompletionUsage) -> None:
    builder.prompt_tokens = usage.prompt_tokens
    builder.output_tokens = usage.completion_tokens
    details = usage.prompt_tokens_details
    builder.cached_tokens = details.cached_tokens if details else None
    receipt = (usage.model_extra or {}).get("receipt")
    builder.receipt = None if receipt is None else msgspec.convert(receipt, TurnReceipt)

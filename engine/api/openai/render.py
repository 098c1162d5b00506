"""POST /v1/chat/completions/render and /v1/completions/render: the prompts of requests, without running them.

Gateways route by the tokens of a prompt. They get them here as V1 returns them, so that they need neither
the tokenizer nor the chat template.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, model_of, read_body
from engine.api.field_names import renamed_fields
from engine.api.http.connection import while_connected
from engine.api.openai.bodies import MediaFeatures, MediaPlace, RenderedPrompt
from engine.api.openai.chat import ChatAnswer
from engine.api.openai.completions import CompletionTurn
from engine.api.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    StreamOptions,
)
from engine.api.turn.conversation_turn import ConversationTurn, RenderedTurn
from engine.records.messages import MediaSpan
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams

OWN_PARAMS = (
    "detokenize",
    "reasoning",
    "output_kind",
    "eos_token_id",
    "bad_words_token_ids",
    "thinking_limit",
    "structured_outputs",
)
"""Parameters that V1 does not have, or that its server sets itself; constraints are converted."""
OWN_CONSTRAINTS = ("reasoning", "calls", "arguments", "texts", "text_end")
"""Parts of a constraint that V1 does not have."""

Value = TypeVar("Value")

router = APIRouter()


@endpoint(router, "POST", "/v1/chat/completions/render", body=ChatCompletionRequest)
async def render_chat_completion(request: Request) -> Response:
    """The prompt of a chat, as token ids; nothing is generated."""
    body = await read_body(request, ChatCompletionRequest)
    model = model_of(request, body.model)
    context = model.context(request.headers, body.identity())
    conversation = ChatAnswer(model, body, request.state.request_id, context).conversation()

    async def respond() -> Response:
        with renamed_fields(body.field_names()):
            turn = await ConversationTurn(model, conversation).render()
        return json_response(_rendered(turn, conversation.request_id, model.name, body))

    return await while_connected(request, respond())


@endpoint(router, "POST", "/v1/completions/render", body=CompletionRequest)
async def render_completion(request: Request) -> Response:
    """A list of the prompts of a completion, as token ids; nothing is generated."""
    body = await read_body(request, CompletionRequest)
    model = model_of(request, body.model)
    context = model.context(request.headers, body.identity())
    completion = CompletionTurn(model, body, request.state.request_id, context)

    async def respond() -> Response:
        turns = await completion.render()
        return json_response([_rendered(turn, name, model.name, body) for name, turn in turns.items()])

    return await while_connected(request, respond())


def _rendered(turn: RenderedTurn, request_id: str, model: str, body: GenerationRequest) -> RenderedPrompt:
    return RenderedPrompt(
        request_id=request_id,
        token_ids=turn.token_ids,
        features=_features(turn.media),
        sampling_params=_sampling_params(turn.params),
        model=model,
        stream=bool(body.stream),
        stream_options=_or_unset(None if body.stream_options is None else _options_of(body.stream_options)),
        cache_salt=_or_unset(body.cache_salt),
        priority=_or_unset(body.priority),
        kv_transfer_params=_or_unset(body.kv_transfer_params),
    )


def _options_of(options: StreamOptions) -> dict[str, bool]:
    return options.model_dump(exclude_none=True)


def _or_unset(value: Value | None) -> Value | UnsetType:
    return UNSET if value is None else value


def _features(media: Iterable[MediaSpan]) -> MediaFeatures | None:
    hashes: dict[str, list[str]] = defaultdict(list)
    places: dict[str, list[MediaPlace]] = defaultdict(list)
    for span in media:
        if span.size is not None:
            hashes[span.size.kind].append(span.content_hash)
            places[span.size.kind].append(MediaPlace(span.offset, span.length))
    return MediaFeatures(hashes, places) if hashes else None


def _sampling_params(params: SamplingParams) -> dict[str, Any]:
    """All parameters that are set, defaults too: another server may have other defaults."""
    fields = msgspec.structs.asdict(params)
    told = {name: value for name, value in fields.items() if value is not None and name not in OWN_PARAMS}
    constraint = params.structured_outputs
    if constraint is not None and _is_plain(constraint):
        told["structured_outputs"] = {
            name: value
            for name, value in msgspec.structs.asdict(constraint).items()
            if value not in (None, False) and name not in ("asked_in", "lenient")
        }
    return told


def _is_plain(constraint: StructuredOutputsParams) -> bool:
    """Whether V1 can express the constraint."""
    return not any(getattr(constraint, part) for part in OWN_CONSTRAINTS)

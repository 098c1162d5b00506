"""/v1/conversations: names a job whose newest response the server remembers."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from time import time
from typing import Any, Literal
from uuid import uuid4

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from engine.api.endpoints import endpoint, json_response, parse_body, read_body, server_of
from engine.api.openai_responses.conversation_lock import ConversationLock
from engine.api.openai_responses.history import with_ids
from engine.api.openai_responses.input_items import Item, MessageList
from engine.api.openai_responses.items import ConversationId, Response, TextConfig, new_response_id
from engine.api.openai_responses.keeper import ResponseKeeper, check_id, keeper_of
from engine.api.openai_responses.request import Metadata
from engine.api.openai_responses.store import PastResponse, PastTurn, ResponseNotStoredError, StoredResponse

router = APIRouter()


class ConversationRequest(BaseModel):
    """Body of POST /v1/conversations."""

    items: list[Item] | None = None
    metadata: Metadata | None = None


class MetadataRequest(BaseModel):
    """Body of POST /v1/conversations/{id}."""

    metadata: Metadata | None


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation without its items."""

    id: str
    object: Literal["conversation", "conversation.deleted"] = "conversation"
    created_at: int
    metadata: dict[str, Any] = {}
    deleted: bool | msgspec.UnsetType = msgspec.UNSET


@endpoint(router, "POST", "/v1/conversations", body=ConversationRequest)
async def create_conversation(request: Request) -> HttpResponse:
    """Creates a conversation, which starts as an empty response."""
    raw = await request.body()
    body = parse_body(ConversationRequest, raw) if raw else ConversationRequest()
    items = body.items or []
    MessageList(None).extend(items, "items")
    beginning = empty_link(
        new_response_id(), f"conv_{uuid4().hex}", server_of(request).name, body.metadata or {}
    )
    stored = StoredResponse(response=beginning, input=list(with_ids(items, beginning.id)))
    await keeper_of(request).store.put(stored)
    return json_response(described(beginning))


@endpoint(router, "GET", "/v1/conversations/{conversation_id}")
async def retrieve_conversation(request: Request) -> HttpResponse:
    """The conversation's start and metadata."""
    keeper = keeper_of(request)
    chain = await chain_of(keeper, request.path_params["conversation_id"])
    return json_response(described(chain[0].response))


@endpoint(router, "POST", "/v1/conversations/{conversation_id}", body=MetadataRequest)
async def update_conversation(request: Request) -> HttpResponse:
    """Replaces the metadata of a conversation."""
    body = await read_body(request, MetadataRequest)
    keeper = keeper_of(request)
    conversation_id = request.path_params["conversation_id"]
    async with held(keeper, conversation_id, new_response_id()):
        chain = await chain_of(keeper, conversation_id)
        stored = await keeper.find(chain[0].response.id)
        noted = msgspec.structs.replace(stored.response, metadata=body.metadata or {})
        await change_link(keeper, chain, msgspec.structs.replace(stored, response=noted))
    return json_response(described(noted))


@endpoint(router, "DELETE", "/v1/conversations/{conversation_id}")
async def delete_conversation(request: Request) -> HttpResponse:
    """Deletes a conversation and all of its responses."""
    keeper = keeper_of(request)
    chain = await chain_of(keeper, request.path_params["conversation_id"])
    for stored in chain:
        await keeper.store.delete(stored.response.id)
    deleted = described(chain[0].response)
    deleted.object = "conversation.deleted"
    deleted.deleted = True
    return json_response(deleted)


async def chain_of(keeper: ResponseKeeper, conversation_id: str) -> list[PastTurn]:
    return await keeper.store.chain(await _newest(keeper, conversation_id), "conversation")


async def _newest(keeper: ResponseKeeper, conversation_id: str) -> str:
    check_id(conversation_id, "conv_", "conversation")
    newest = await keeper.store.newest(conversation_id)
    if newest is None:
        raise ResponseNotStoredError(f"Conversation {conversation_id[:100]!r}", keeper.store.limits)
    return newest


def described(beginning: Response | PastResponse) -> Conversation:
    assert beginning.conversation is not None
    return Conversation(
        id=beginning.conversation.id, created_at=beginning.created_at, metadata=beginning.metadata
    )


def empty_link(
    response_id: str, conversation_id: str, model: str, metadata: dict[str, Any] | None = None
) -> Response:
    """A response without output, as a link of a conversation."""
    return Response(
        id=response_id,
        created_at=int(time()),
        status="completed",
        model=model,
        conversation=ConversationId(conversation_id),
        temperature=1.0,
        top_p=1.0,
        text=TextConfig(format={"type": "text"}),
        metadata=metadata or {},
    )


@asynccontextmanager
async def held(keeper: ResponseKeeper, conversation_id: str, by: str) -> AsyncGenerator[None, None]:
    """Locks the conversation against turns within the block."""
    await _newest(keeper, conversation_id)
    lock = await ConversationLock.take(keeper.store, conversation_id, by)
    try:
        yield
    finally:
        await lock.release()


async def change_link(keeper: ResponseKeeper, chain: list[PastTurn], changed: StoredResponse) -> None:
    """Replaces a link of a locked conversation."""
    await keeper.store.update(changed)
    newest = chain[-1].response.id
    if changed.response.id != newest:  # an update makes its response the newest
        await keeper.store.update(await keeper.find(newest))

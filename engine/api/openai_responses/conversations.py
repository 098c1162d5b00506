"""/v1/conversations: a name for a job whose newest response the server remembers for the client."""

from __future__ import annotations

from time import time
from typing import Any, Literal
from uuid import uuid4

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from engine.api.endpoints import endpoint, json_response, model_of, parse_body
from engine.api.openai_responses.history import with_ids
from engine.api.openai_responses.input_items import Item, MessageList
from engine.api.openai_responses.items import ConversationId, Response, TextConfig, new_response_id
from engine.api.openai_responses.keeper import ResponseKeeper, keeper_of
from engine.api.openai_responses.request import Metadata
from engine.api.openai_responses.store import PastResponse, PastTurn, ResponseNotStoredError, StoredResponse

router = APIRouter()


class ConversationRequest(BaseModel):
    """Body of POST /v1/conversations."""

    items: list[Item] | None = None
    metadata: Metadata | None = None


class Conversation(msgspec.Struct, kw_only=True):
    """A conversation without its items."""

    id: str
    object: Literal["conversation", "conversation.deleted"] = "conversation"
    created_at: int
    metadata: dict[str, Any] = {}
    deleted: bool | msgspec.UnsetType = msgspec.UNSET


@endpoint(router, "POST", "/v1/conversations", body=ConversationRequest)
async def create_conversation(request: Request) -> HttpResponse:
    """A conversation that responses can be asked for in. It begins as a response to nothing."""
    raw = await request.body()
    body = parse_body(ConversationRequest, raw) if raw else ConversationRequest()
    items = body.items or []
    MessageList(None).extend(items, "items")
    beginning = Response(
        id=new_response_id(),
        created_at=int(time()),
        status="completed",
        model=model_of(request).name,
        conversation=ConversationId(f"conv_{uuid4().hex}"),
        temperature=1.0,
        top_p=1.0,
        text=TextConfig(format={"type": "text"}),
        metadata=body.metadata or {},
    )
    stored = StoredResponse(response=beginning, input=list(with_ids(items, beginning.id)))
    await keeper_of(request).store.put(stored)
    return json_response(_conversation(beginning))


@endpoint(router, "GET", "/v1/conversations/{conversation_id}")
async def retrieve_conversation(request: Request) -> HttpResponse:
    """When a conversation was begun, and what its client noted about it."""
    keeper = keeper_of(request)
    chain = await _chain(keeper, request.path_params["conversation_id"])
    return json_response(_conversation(chain[0].response))


@endpoint(router, "DELETE", "/v1/conversations/{conversation_id}")
async def delete_conversation(request: Request) -> HttpResponse:
    """Forget a conversation and all its responses."""
    keeper = keeper_of(request)
    chain = await _chain(keeper, request.path_params["conversation_id"])
    for stored in chain:
        await keeper.store.delete(stored.response.id)
    deleted = _conversation(chain[0].response)
    deleted.object, deleted.deleted = "conversation.deleted", True
    return json_response(deleted)


async def _chain(keeper: ResponseKeeper, conversation_id: str) -> list[PastTurn]:
    newest = await keeper.store.newest(conversation_id)
    if newest is None:
        raise ResponseNotStoredError(f"Conversation {conversation_id[:100]!r}", keeper.store.limits)
    return await keeper.store.chain(newest, "conversation")


def _conversation(beginning: Response | PastResponse) -> Conversation:
    assert beginning.conversation is not None
    return Conversation(
        id=beginning.conversation.id, created_at=beginning.created_at, metadata=beginning.metadata
    )

"""/v1/conversations/{id}/items: lists, adds and deletes the items of a conversation.

A conversation is a chain of stored responses. Items that a client adds form a separate link, a response
without output; an item is deleted from the link that holds it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from engine.api.endpoints import endpoint, json_response, read_body, server_of
from engine.api.errors import NotFoundError
from engine.api.openai.protocol import ListOf
from engine.api.openai_responses.conversations import chain_of, change_link, described, empty_link, held
from engine.api.openai_responses.history import History, output_items, with_ids
from engine.api.openai_responses.input_items import Item, kind_of
from engine.api.openai_responses.items import new_response_id
from engine.api.openai_responses.keeper import keeper_of
from engine.api.openai_responses.pages import list_of, page_of
from engine.api.openai_responses.store import PastTurn, StoredResponse
from engine.api.prompt.left_out import LeftOut

router = APIRouter()

MAX_ADDED_ITEMS = 1000
"""Maximum number of items added at once; OpenAI's limit is 20."""


class ItemsRequest(BaseModel):
    """Body of POST /v1/conversations/{id}/items."""

    items: Annotated[ListOf[Item], Field(min_length=1, max_length=MAX_ADDED_ITEMS)]


@endpoint(router, "GET", "/v1/conversations/{conversation_id}/items")
async def list_conversation_items(request: Request) -> HttpResponse:
    """Lists the items of a conversation, by default newest first."""
    chain = await chain_of(keeper_of(request), request.path_params["conversation_id"])
    return json_response(page_of(request, [_shown(item) for item in _items(chain)]))


@endpoint(router, "POST", "/v1/conversations/{conversation_id}/items", body=ItemsRequest)
async def create_conversation_items(request: Request) -> HttpResponse:
    """Appends items to a conversation."""
    body = await read_body(request, ItemsRequest)
    keeper = keeper_of(request)
    conversation_id = request.path_params["conversation_id"]
    added_by = new_response_id()
    async with held(keeper, conversation_id, added_by):
        chain = await chain_of(keeper, conversation_id)
        History(before=chain).messages(None, LeftOut()).extend(body.items, "items")
        link = empty_link(added_by, conversation_id, server_of(request).name)
        items = list(with_ids(body.items, added_by))
        previous = chain[-1]
        await keeper.store.put(
            StoredResponse(
                response=link, input=items, previous_id=previous.response.id, job_id=previous.job_id
            )
        )
    return json_response(list_of([_shown(item) for item in items]))


@endpoint(router, "GET", "/v1/conversations/{conversation_id}/items/{item_id}")
async def retrieve_conversation_item(request: Request) -> HttpResponse:
    """One item of a conversation."""
    chain = await chain_of(keeper_of(request), request.path_params["conversation_id"])
    _, item = _find(chain, request.path_params["item_id"])
    return HttpResponse(msgspec.json.encode(_shown(item)), media_type="application/json")


@endpoint(router, "DELETE", "/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_conversation_item(request: Request) -> HttpResponse:
    """Deletes one item of a conversation."""
    keeper = keeper_of(request)
    conversation_id = request.path_params["conversation_id"]
    item_id = request.path_params["item_id"]
    async with held(keeper, conversation_id, new_response_id()):
        chain = await chain_of(keeper, conversation_id)
        link, _ = _find(chain, item_id)
        stored = await keeper.find(link.response.id)
        await change_link(keeper, chain, _without(stored, item_id))
    return json_response(described(chain[0].response))


def _items(chain: list[PastTurn]) -> list[Item]:
    """The items, oldest first."""
    return [item for link in chain for item in (*link.input, *output_items(link))]


def _find(chain: list[PastTurn], item_id: str) -> tuple[PastTurn, Item]:
    """Returns the item and the link that holds it; the newest, if several have the id."""
    for link in reversed(chain):
        for item in (*reversed(output_items(link)), *reversed(link.input)):
            if item.get("id") == item_id:
                return link, item
    raise NotFoundError(f"The conversation has no item {item_id[:100]!r}.", "item_id")


def _without(stored: StoredResponse, item_id: str) -> StoredResponse:
    response = msgspec.structs.replace(
        stored.response, output=[item for item in stored.response.output if item.id != item_id]
    )
    kept = [item for item in stored.input if item.get("id") != item_id]
    return msgspec.structs.replace(stored, response=response, input=kept)


def _shown(item: Item) -> Item:
    """An item as clients read it: with its type, and with a message's text as a part."""
    if kind_of(item) != "message":
        return item
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
        if kind == "output_text":
            content[0] |= {"annotations": []}
    return {**item, "type": "message", "status": item.get("status") or "completed", "content": content}

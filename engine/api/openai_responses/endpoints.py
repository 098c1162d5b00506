"""/v1/responses: OpenAI's API for jobs whose turns the server stores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from time import monotonic
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

from engine.api.endpoints import endpoint, json_response, model_of, read_body, whole_number
from engine.api.errors import ApiFormat, NotFoundError, OverloadedError
from engine.api.http.connection import EventStream, while_connected
from engine.api.http.streams import begun
from engine.api.openai_responses.conversation_lock import RENEW_S
from engine.api.openai_responses.events import Event
from engine.api.openai_responses.history import stored_items
from engine.api.openai_responses.items import ENDED
from engine.api.openai_responses.keeper import ResponseKeeper, keeper_of
from engine.api.openai_responses.pages import page_of
from engine.api.openai_responses.request import ResponsesRequest
from engine.api.openai_responses.store import StoredResponse
from engine.api.openai_responses.turn import Asker, ResponseTurn
from engine.api.prompt_cache.diagnostics import CacheDiagnostics
from engine.errors import RequestError

router = APIRouter()

CANCEL_TIMEOUT_S = 10 * RENEW_S
"""Seconds for which a cancellation waits for the process that runs the response."""


class DeletedResponse(msgspec.Struct, kw_only=True):
    """A deleted response."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct, kw_only=True):
    """The token count of a prompt."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@endpoint(router, "POST", "/v1/responses", body=ResponsesRequest)
async def create_response(request: Request) -> HttpResponse:
    """The next turn of a job: items in, items out."""
    body = await read_body(request, ResponsesRequest)
    turn = await ResponseTurn.begin(_asker(request, body), body)
    if body.background:
        return await _in_background(keeper_of(request), turn, streams=bool(body.stream))
    return await while_connected(request, _respond(turn, streams=bool(body.stream)))


def _asker(request: Request, body: ResponsesRequest) -> Asker:
    model = model_of(request, body.model)
    diagnostics = CacheDiagnostics.of(request, model)
    keeper = keeper_of(request)
    return Asker(model, keeper.store, keeper.turns, request.headers, diagnostics)


async def _respond(turn: ResponseTurn, *, streams: bool) -> HttpResponse:
    if not streams:
        return json_response(await turn.whole())
    events = await begun(turn.events(), turn.patience)
    return EventStream(_encoded(turn.to_the_end(events)), ApiFormat.RESPONSES, sign_of_life=turn.sign_of_life)


async def _in_background(keeper: ResponseKeeper, turn: ResponseTurn, *, streams: bool) -> HttpResponse:
    queued = turn.response
    try:
        await keeper.runs.start(turn, logs_events=streams)
    except OverloadedError:
        await turn.give_up()
        raise
    if streams:
        return _event_stream(keeper.runs.follow(queued.id))
    return json_response(queued)


def _event_stream(events: AsyncGenerator[bytes, None]) -> EventStream:
    return EventStream(events, ApiFormat.RESPONSES)


async def _encoded(events: AsyncGenerator[Event, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(events):
        async for event in events:
            yield event.encode()


@endpoint(router, "POST", "/v1/responses/input_tokens", body=ResponsesRequest)
async def count_input_tokens(request: Request) -> HttpResponse:
    """Counts the tokens of a request's prompt without generating."""
    body = await read_body(request, ResponsesRequest)
    turn = await ResponseTurn.sketch(_asker(request, body), body)

    async def count() -> HttpResponse:
        return json_response(InputTokens(input_tokens=await turn.count_input_tokens()))

    return await while_connected(request, count())


@endpoint(router, "POST", "/v1/responses/compact")
async def compact(request: Request) -> HttpResponse:
    """Unsupported: conversations are shortened by ``truncation: auto``, or by the client."""
    raise NotFoundError(
        "This server does not compact conversations: send a shorter one, or set truncation to 'auto', "
        "which leaves out the oldest turns."
    )


@endpoint(router, "GET", "/v1/responses/{response_id}")
async def retrieve_response(request: Request) -> HttpResponse:
    """Returns the state of a response, or its events from ``starting_after`` on."""
    keeper = keeper_of(request)
    response_id = request.path_params["response_id"]
    stored = await keeper.find(response_id)
    if request.query_params.get("stream", "").lower() not in ("true", "1"):
        return json_response(stored.response)
    after = whole_number(request, "starting_after", -1, -1, 2**31)
    return _event_stream(keeper.runs.follow(response_id, after + 1))


@endpoint(router, "POST", "/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request) -> HttpResponse:
    """Cancels a background response; one that has ended stays unchanged."""
    keeper = keeper_of(request)
    response_id = request.path_params["response_id"]
    stored = await keeper.find(response_id)
    if not stored.response.background:
        raise RequestError("Only background responses can be cancelled; for others, close the connection.")
    if stored.response.status not in ENDED:
        await keeper.runs.cancel(response_id)
        stored = await _ended(keeper, response_id)
    return json_response(stored.response)


async def _ended(keeper: ResponseKeeper, response_id: str) -> StoredResponse:
    """Waits for a response to end, in whichever process it runs; returns its current state if that takes too
    long."""
    deadline = monotonic() + CANCEL_TIMEOUT_S
    while True:
        stored = await keeper.find(response_id)
        if stored.response.status in ENDED or monotonic() > deadline:
            return stored
        await asyncio.sleep(RENEW_S / 4)


@endpoint(router, "DELETE", "/v1/responses/{response_id}")
async def delete_response(request: Request) -> HttpResponse:
    """Deletes a response. A running background response is cancelled."""
    keeper = keeper_of(request)
    response_id = request.path_params["response_id"]
    await keeper.find(response_id)
    await keeper.store.delete(response_id)
    keeper.turns.forget(response_id)
    await CacheDiagnostics.of(request, model_of(request, None)).forget(response_id)
    return json_response(DeletedResponse(id=response_id))


@endpoint(router, "GET", "/v1/responses/{response_id}/input_items")
async def list_input_items(request: Request) -> HttpResponse:
    """Lists the input items of a response, including those of earlier turns; by default newest first."""
    keeper = keeper_of(request)
    response_id = request.path_params["response_id"]
    items = stored_items(await keeper.store.chain(response_id, "response_id"))
    return json_response(page_of(request, items))

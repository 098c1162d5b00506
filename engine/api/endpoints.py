"""Registers endpoints with the schema of their body, validates bodies, and formats errors for the API."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.api.errors import ApiFormat, error_response
from engine.api.http.connection import CLIENT_CLOSED_REQUEST
from engine.api.http.json_limits import check_json
from engine.api.http.surrogates import without_lone_surrogates
from engine.api.service.identity import owner_of
from engine.api.service.model import Model
from engine.api.service.server import Server
from engine.api.unsupported import refuse_unsupported
from engine.errors import RequestError

Endpoint = Callable[[Request], Awaitable[Response]]
Body = TypeVar("Body", bound=BaseModel)
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,19}")


def endpoint(
    router: APIRouter,
    method: str,
    *paths: str,
    body: type[BaseModel] | None = None,
    operators_only: bool = False,
) -> Callable[[Endpoint], Endpoint]:
    """Registers an endpoint under its paths. ``body`` is the schema for OpenAPI; the endpoint parses it
    itself. ``operators_only``: the endpoint affects all clients, so a key with a name cannot use it."""

    def register(answer_request: Endpoint) -> Endpoint:
        async def answer(request: Request) -> Response:
            try:
                if operators_only:
                    check_operator(request)
                return await answer_request(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            except Exception as error:
                return answer_error(request, error)

        for path in paths:
            router.add_api_route(
                path,
                answer,
                methods=[method],
                name=answer_request.__name__,
                operation_id=f"{answer_request.__name__}_{method}_{path}",
                description=answer_request.__doc__ or "",
                response_model=None,
                openapi_extra=_request_body(body),
            )
        return answer_request

    return register


def check_operator(request: Request) -> None:
    """Raises 403 if the request's API key has an owner: such a key belongs to one of several clients."""
    if (owner := owner_of(request.headers)) is not None:
        raise HTTPException(
            403,
            f"{request.url.path[:100]} is for the operator of this server: it needs an API key without a "
            f"name, and this one is {owner}'s.",
        )


def answer_error(request: Request, error: Exception) -> Response:
    """Returns the error in the format of the API that the path belongs to."""
    return error_response(error, ApiFormat.of_path(request.url.path), request.state.request_id)


def _request_body(body: type[BaseModel] | None) -> dict[str, Any] | None:
    if body is None:
        return None
    schema = body.model_json_schema(mode="validation")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Parses and validates a body. Bad UTF-8, bad or too deeply nested JSON and wrong types raise
    one kind of error."""
    body = body.removeprefix(BOM_UTF8)  # may be ignored (RFC 8259, 8.1); Windows often writes it
    body = without_lone_surrogates(body)
    check_json(body)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        _refuse_stand_ins(kind, error)
        raise


def _refuse_stand_ins(kind: type[BaseModel], error: ValidationError) -> None:
    """Raises RequestError if an unsupported field is sent and a required one is missing."""
    for fault in error.errors(include_url=False, include_context=False):
        given = fault["input"]
        if fault["type"] == "missing" and len(fault["loc"]) == 1 and isinstance(given, dict):
            known = kind.model_fields
            refuse_unsupported({name: value for name, value in given.items() if name not in known})


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Reads and validates the request's body."""
    return parse_body(kind, await request.body())


def server_of(request: Request) -> Server:
    """The server's shared components in this process."""
    server: Server = request.app.state.server
    return server


def model_of(request: Request, name: str | None) -> Model:
    """The model of that name; None: the first one. ModelNotFoundError for an unknown name."""
    return server_of(request).model(name)


def whole_number(request: Request, name: str, default: int, low: int, high: int) -> int:
    """Reads an integer of the query string; RequestError if it is out of range, whatever its length."""
    text = request.query_params.get(name)
    if text is None:
        return default
    match = _WHOLE_NUMBER.fullmatch(text)
    if match is None or not low <= int(text) <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}.", name)
    return int(text)


def json_response(body: msgspec.Struct | Sequence[msgspec.Struct]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")

"""How an endpoint is made: registered with its body's schema, bodies checked, errors in the API's shape."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from engine.api.errors import Dialect, error_response
from engine.api.http.connection import CLIENT_CLOSED_REQUEST
from engine.api.http.json_limits import check_json
from engine.api.http.surrogates import without_halves
from engine.api.identity import owner_of
from engine.api.served_model import ServedModel
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
    """Register an endpoint under its paths. ``body`` is what it will parse: here it is only described.
    ``operators_only``: what it tells or does concerns everybody, so a key with a name does not open it."""

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
    """403 if the request's API key is one owner's, who is one among others."""
    if (owner := owner_of(request.headers)) is not None:
        raise HTTPException(
            403,
            f"{request.url.path[:100]} is for the operator of this server: it needs an API key without a "
            f"name, and this one is {owner}'s.",
        )


def answer_error(request: Request, error: Exception) -> Response:
    """The error in the dialect of the path that was asked."""
    return error_response(error, Dialect.of_path(request.url.path), request.state.request_id)


def _request_body(body: type[BaseModel] | None) -> dict[str, Any] | None:
    if body is None:
        return None
    schema = body.model_json_schema(mode="validation")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Bytes to a checked request; bad UTF-8, bad or too deeply nested JSON and wrong types are one error."""
    body = body.removeprefix(
        BOM_UTF8
    )  # which a parser may ignore (RFC 8259, 8.1), and Windows likes to write
    body = without_halves(body)
    check_json(body)
    return kind.model_validate_json(body)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """The request's body, checked."""
    return parse_body(kind, await request.body())


def model_of(request: Request, name: str | None = None) -> ServedModel:
    """What the server serves; ModelNotFoundError if the request names another model."""
    model: ServedModel = request.app.state.model
    model.check_name(name)
    return model


def whole_number(request: Request, name: str, default: int, low: int, high: int) -> int:
    """A number of the query; RequestError for one out of its range, which may be of any length."""
    text = request.query_params.get(name)
    if text is None:
        return default
    match = _WHOLE_NUMBER.fullmatch(text)
    if match is None or not low <= int(text) <= high:
        raise RequestError(f"{name} must be a whole number from {low} to {high}.", name)
    return int(text)


def json_response(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")

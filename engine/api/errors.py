"""Every failure as an answer in OpenAI's shape: bounded in size, the field at fault named, no traceback."""

from __future__ import annotations

import logging

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.errors import EngineDeadError, EngineError, RequestError

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2000
MAX_LISTED_FAULTS = 10

_TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve (HTTP 404)."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model[:200]}` does not exist.", "model")


class ServerClosingError(EngineError):
    """The server was told to stop and this request did not end in time (HTTP 503)."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down; the request was ended before it was complete.")


class ErrorInfo(msgspec.Struct):
    """The body of ``error`` in a response or in a stream."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorResponse(msgspec.Struct):
    """What a client gets instead of a result."""

    error: ErrorInfo


def describe(error: Exception) -> ErrorResponse:
    """What to tell the client about an error. One that we did not expect says nothing of our insides."""
    match error:
        case ModelNotFoundError():
            return _info(404, str(error), error.field)
        case RequestError():
            return _info(400, str(error), error.field)
        case ValidationError():
            return _from_validation(error)
        case EngineDeadError() | ServerClosingError():
            return _info(503, str(error))
        case HTTPException():
            return _info(error.status_code, str(error.detail))
        case EngineError():
            return _info(500, str(error))
    logger.error("request failed unexpectedly", exc_info=error)
    return _info(500, f"Internal error: {type(error).__name__}.")


def error_response(error: Exception) -> Response:
    described = describe(error)
    headers = error.headers if isinstance(error, HTTPException) else None
    return Response(
        msgspec.json.encode(described),
        status_code=described.error.code,
        headers=dict(headers) if headers else None,
        media_type="application/json",
    )


def _info(code: int, message: str, param: str | None = None) -> ErrorResponse:
    kind = _TYPES.get(code, "BadRequestError" if code < 500 else "InternalServerError")
    safe = message[:MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
    return ErrorResponse(ErrorInfo(safe, kind, param, code))


def _from_validation(error: ValidationError) -> ErrorResponse:
    """One line per field at fault; the client's input is never echoed (it may be megabytes)."""
    faults: dict[str, str] = {}
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        field = str(fault["loc"][0]) if fault["loc"] else ""
        where = ".".join(str(part) for part in fault["loc"])[:100]
        faults.setdefault(field, f"{where}: {fault['msg'][:200]}" if where else fault["msg"][:200])
        if len(faults) == MAX_LISTED_FAULTS:
            break
    return _info(400, "; ".join(faults.values()), next(iter(faults), None) or None)

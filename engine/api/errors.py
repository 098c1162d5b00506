"""Converts every error to a response in the client's API format: of bounded size, naming the field, without a
traceback."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    RequestError,
    TooLateError,
    TryAgainError,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE_CHARS = 2000
MAX_FIELD_CHARS = 200
MAX_LISTED_FAULTS = 10
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""OpenAI's error code, by which clients decide to shorten a conversation."""
RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
"""OpenAI's error code, on which clients send the request again after ``Retry-After``."""
RETRY_AFTER_S = 1
"""``Retry-After`` if this server may accept the request soon, or another server may."""

_OPENAI_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "GatewayTimeoutError",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiFormat(Enum):
    """The API whose format a response has."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    RESPONSES = "responses"
    """OpenAI's Responses API: errors as in chat, but streams do not end with [DONE]."""

    @classmethod
    def of_path(cls, path: str) -> ApiFormat:
        return cls.ANTHROPIC if path == "/v1/messages" or path.startswith("/v1/messages/") else cls.OPENAI


class NotFoundError(RequestError):
    """The request names something that does not exist (HTTP 404)."""


class ModelNotFoundError(NotFoundError):
    """The request names a model that this server does not serve."""

    def __init__(self, model: str, served: Sequence[str]) -> None:
        names = ", ".join(f"`{name}`" for name in served)
        super().__init__(
            f"The model `{model[:200]}` does not exist; this server has --served-model-name {names}.", "model"
        )


class ThreadsUnsupportedError(RequestError):
    """The client requested a conversation stored on the server (HTTP 400). Anthropic's clients then send all
    of it."""

    def __init__(self) -> None:
        super().__init__("thread is not supported: send the whole conversation in messages.", "thread")


class ConversationLockedError(RequestError):
    """Another turn of the conversation is in progress (HTTP 400); OpenAI's message and code."""

    def __init__(self) -> None:
        super().__init__(
            "Another process is currently operating on this conversation. Please retry in a few seconds.",
            "conversation",
        )


class ServerClosingError(EngineError):
    """The server is shutting down and this request did not end in time (HTTP 503)."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down; the request was ended before it was complete.")


class CoreStalledError(EngineError):
    """The engine core is alive but makes no progress (HTTP 503)."""


class OverloadedError(EngineError):
    """The server has reached a limit of concurrent work (HTTP 503)."""


class QuotaError(EngineError):
    """The request's key has used what it may (HTTP 429)."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(EngineError):
    """A request exceeded its deadline, or the server's time limit (HTTP 504)."""

    def __init__(self, limit: str, timeout_s: float) -> None:
        super().__init__(f"The request was ended: it took longer than {limit}, {timeout_s:g} s.")


class ErrorInfo(msgspec.Struct):
    """OpenAI's ``error`` in a response or in a stream."""

    message: str
    type: str
    param: str | None
    code: int | str
    """The HTTP status, or the code that OpenAI's clients react to."""


class ErrorResponse(msgspec.Struct):
    """An error response to an OpenAI client."""

    error: ErrorInfo


class AnthropicErrorDetails(msgspec.Struct):
    """Details that Anthropic's libraries use to retry without the part that failed."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorInfo(msgspec.Struct):
    """Anthropic's ``error``. It has no member for a field, so the message names it."""

    type: str
    message: str
    details: AnthropicErrorDetails | UnsetType = UNSET


class AnthropicErrorResponse(msgspec.Struct, kw_only=True):
    """An error response to an Anthropic client, also sent as the last event of a failed stream."""

    type: str = "error"
    error: AnthropicErrorInfo
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An error for a client, independent of the API."""

    status: int
    message: str
    field: str | None = None
    details: AnthropicErrorDetails | None = None
    code: str | None = None


def describe(
    error: Exception, api_format: ApiFormat = ApiFormat.OPENAI, request_id: str | None = None
) -> ErrorResponse | AnthropicErrorResponse:
    """Returns the error in the format of this API."""
    return _rendered(explain(error), api_format, request_id)


def error_response(
    error: Exception, api_format: ApiFormat = ApiFormat.OPENAI, request_id: str | None = None
) -> Response:
    """Returns the complete error response."""
    failure = explain(error)
    body = msgspec.json.encode(_rendered(failure, api_format, request_id))
    return Response(body, failure.status, _headers(error), "application/json")


def explain(error: Exception) -> Failure:
    """Maps an exception to an error for the client. An unexpected one discloses no internals."""
    match error:
        case NotFoundError():
            code = "model_not_found" if isinstance(error, ModelNotFoundError) else None
            return _failure(404, str(error), error.field, code)
        case ThreadsUnsupportedError():
            details = AnthropicErrorDetails("thread_unsupported_request", ["thread"])
            return Failure(400, str(error), error.field, details)
        case ConversationLockedError():
            return Failure(400, str(error), error.field, code="conversation_locked")
        case ContextLengthError():
            return _failure(400, str(error), error.field, CONTEXT_LENGTH_EXCEEDED)
        case RequestError():
            return _failure(400, str(error), error.field)
        case ValidationError():
            return _from_validation(error)
        case (
            EngineDeadError()
            | CoreStalledError()
            | ServerClosingError()
            | OverloadedError()
            | TryAgainError()
        ):
            return _failure(503, str(error))
        case RequestTimeoutError():
            return _failure(504, str(error))
        case TooLateError() | QuotaError():
            return _failure(429, str(error), code=RATE_LIMIT_EXCEEDED)
        case HTTPException():
            code = "invalid_api_key" if error.status_code == 401 else None
            return _failure(error.status_code, str(error.detail), code=code)
        case EngineError():
            return _failure(500, str(error))
    logger.error("Unhandled error in a request", exc_info=error)
    return _failure(500, f"Internal error: {type(error).__name__}.")


def _rendered(
    failure: Failure, api_format: ApiFormat, request_id: str | None
) -> ErrorResponse | AnthropicErrorResponse:
    if api_format is ApiFormat.ANTHROPIC:
        kind = _type_of(failure.status, _ANTHROPIC_TYPES, "invalid_request_error", "api_error")
        error = AnthropicErrorInfo(kind, _naming_the_field(failure), failure.details or UNSET)
        return AnthropicErrorResponse(error=error, request_id=request_id)
    kind = _type_of(failure.status, _OPENAI_TYPES, "BadRequestError", "InternalServerError")
    return ErrorResponse(ErrorInfo(failure.message, kind, failure.field, failure.code or failure.status))


def _type_of(status: int, types: Mapping[int, str], theirs: str, ours: str) -> str:
    return types.get(status, theirs if status < 500 else ours)


def _naming_the_field(failure: Failure) -> str:
    if failure.field is None or failure.field in failure.message:
        return failure.message
    return f"{failure.field}: {failure.message}"


def _headers(error: Exception) -> Mapping[str, str] | None:
    if isinstance(error, OverloadedError | ServerClosingError):
        return {"Retry-After": str(RETRY_AFTER_S)}
    if isinstance(error, TooLateError | QuotaError):
        return {"Retry-After": str(math.ceil(error.retry_after_s))}
    return error.headers if isinstance(error, HTTPException) else None


def _failure(status: int, message: str, field: str | None = None, code: str | None = None) -> Failure:
    return Failure(
        status,
        _bounded(message, MAX_MESSAGE_CHARS),
        field and _bounded(field, MAX_FIELD_CHARS),
        code=code,
    )


def _bounded(text: str, max_chars: int) -> str:
    """Truncates text from a request, which may be megabytes long and hold invalid Unicode."""
    return text[:max_chars].encode("utf-8", "replace").decode()


def _from_validation(error: ValidationError) -> Failure:
    """One line per invalid field. The client's input is never repeated, since it may be megabytes long."""
    faults: dict[str, str] = {}
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        parts = [str(part) or '""' for part in fault["loc"]]  # a field may have an empty name
        field = parts[0] if parts else ""
        where = ".".join(parts)[:100]
        faults.setdefault(field, f"{where}: {fault['msg'][:200]}" if where else fault["msg"][:200])
        if len(faults) == MAX_LISTED_FAULTS:
            break
    return _failure(400, "; ".join(faults.values()), next(iter(faults), None) or None)

"""Middleware for every request: its id, the limit of its body, its origin."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Collection
from secrets import token_hex

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.errors import ApiFormat, error_response

MAX_ID_CHARS = 128

_HARMLESS = frozenset(("GET", "HEAD", "OPTIONS"))
_ID_CHARS = frozenset(string.ascii_letters + string.digits + "-_.:/=+@")


def refusal(error: Exception, scope: Scope) -> ASGIApp:
    """Returns middleware's error response, in the format of the path's API."""
    request_id = scope.get("state", {}).get("request_id")
    return error_response(error, ApiFormat.of_path(scope["path"]), request_id)


class RequestIdMiddleware:
    """Sets ``request.state.request_id`` to the client's ``X-Request-Id``, or to a new one.

    It is returned in the response, so that logs of client and server can be joined. Two concurrent
    requests never share an id: the later one gets a suffix.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._in_use: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))
        if request_id in self._in_use:
            request_id += f"-{token_hex(6)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = request_id.encode()
                # Anthropic's clients read the second one.
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", name),
                    (b"request-id", name),
                ]
            await send(message)

        self._in_use.add(request_id)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._in_use.discard(request_id)


def _request_id(value: str) -> str:
    """The id reduced to plain characters, since it appears in headers, response ids and logs."""
    return "".join(char for char in value[:MAX_ID_CHARS] if char in _ID_CHARS) or token_hex(16)


class OriginMiddleware:
    """Answers 403 to web pages of other origins that are not allowed.

    Browsers send such requests and only hide the response from the page. Without this check any
    page could start work on a server that its reader's machine can reach.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _HARMLESS or self._may_ask(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = HTTPException(
            403, "Requests from this origin are not allowed; --allowed-origins lists those that are."
        )
        await refusal(error, scope)(scope, receive, send)

    def _may_ask(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed or origin in self._allowed:
            return True
        return origin.partition("://")[2] == headers.get("host")


class BodyLimitMiddleware:
    """Answers 413 to a body that is too large, as soon as that is known, and 408 to one that is too slow."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif _content_length(scope) > self._max_bytes:
            await refusal(self._too_large(), scope)(scope, receive, send)
        else:
            await self._app(scope, self._limited(receive), send)

    def _limited(self, receive: Receive) -> Receive:
        """Wraps ``receive``; errors are raised where the body is read, so that the endpoint formats them."""
        num_bytes = 0
        deadline: float | None = asyncio.get_running_loop().time() + self._timeout_s

        async def receive_limited() -> Message:
            nonlocal num_bytes, deadline
            if deadline is None:
                return await receive()  # the body is complete: only a disconnect can follow
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                deadline = None
            return message

        return receive_limited

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"The request's body exceeds {self._max_bytes} bytes.")

    def _too_slow(self) -> HTTPException:
        return HTTPException(408, f"The request's body took longer than {self._timeout_s:g} s.")


def _content_length(scope: Scope) -> int:
    """The announced length; 0 if there is none, or it is invalid."""
    value = Headers(scope=scope).get("content-length", "")
    return int(value[:20]) if value.isascii() and value.isdigit() else 0

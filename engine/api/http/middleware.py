"""What every request passes on the way to its endpoint: it gets an id, its body a limit, its page a look."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Collection
from secrets import token_hex

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.errors import Dialect, error_response

MAX_ID_CHARS = 128

_HARMLESS = frozenset(("GET", "HEAD", "OPTIONS"))
_ID_CHARS = frozenset(string.ascii_letters + string.digits + "-_.:/=+@")


def refusal(error: Exception, scope: Scope) -> ASGIApp:
    """The answer to a request that does not reach its endpoint, in the dialect of its path."""
    request_id = scope.get("state", {}).get("request_id")
    return error_response(error, Dialect.of_path(scope["path"]), request_id)


class RequestIdMiddleware:
    """The client's ``X-Request-Id`` or a new one; endpoints find it in ``request.state.request_id``.

    It is sent back, so that a client's log and ours can be joined. Of two requests that are answered at the
    same time no two have the same id: the later one's is made longer.
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
                # The second is what Anthropic's clients read.
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


def _request_id(said: str) -> str:
    """It goes into a header, into ids of responses and into logs: only plain characters are kept."""
    return "".join(char for char in said[:MAX_ID_CHARS] if char in _ID_CHARS) or token_hex(16)


class OriginMiddleware:
    """403 for what a web page sends that is neither the server's own nor named as allowed.

    Browsers send it, only the answer is kept from the page: without this any page could make a server that is
    in its reader's reach, or on the reader's own machine, work and forget.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in _HARMLESS or self._may_ask(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = HTTPException(
            403, "Pages of this origin may not ask; --allowed-origins names those that may."
        )
        await refusal(error, scope)(scope, receive, send)

    def _may_ask(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed or origin in self._allowed:
            return True
        return origin.partition("://")[2] == headers.get("host")


class BodyLimitMiddleware:
    """413 for a body that is too large, at the latest when that much has come; 408 for one too slow."""

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
        """The errors are raised where the body is read, so that the endpoint answers in its dialect."""
        num_bytes = 0
        deadline: float | None = asyncio.get_running_loop().time() + self._timeout_s

        async def receive_limited() -> Message:
            nonlocal num_bytes, deadline
            if deadline is None:
                return await receive()  # the body is complete: only the client's leaving can still come
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
    """What is announced; 0 if nothing is, or nothing that is a number."""
    said = Headers(scope=scope).get("content-length", "")
    return int(said[:20]) if said.isascii() and said.isdigit() else 0

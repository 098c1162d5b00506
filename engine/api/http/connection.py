"""A client's connection: cancels work when the client leaves, and closes the source of a stream that ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from engine.api.errors import ApiFormat, describe
from engine.api.http import sse
from engine.api.http.head import IS_HEAD

CLIENT_CLOSED_REQUEST = 499
EVENT_S = 120.0
KEEP_ALIVES = 8
"""A keep-alive that clients count as an event is sent after this many seconds or keep-alives without an
event, whichever is first."""


async def while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Runs ``work``, which is cancelled if the client disconnects first. The body must have been read."""
    task = asyncio.current_task()
    assert task is not None
    leaving = asyncio.create_task(_cancel_at_disconnect(request, task))
    try:
        return await work
    except asyncio.CancelledError:
        if not leaving.done():
            raise
        task.uncancel()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        leaving.cancel()


async def _cancel_at_disconnect(request: Request, task: asyncio.Task[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    task.cancel()


class EventStream(StreamingResponse):
    """A stream of server-sent events. However it ends, its source is closed; an error becomes an event.

    A silent stream sends comments, or the API's own keep-alive event, so that no proxy closes it. Claude Code
    and Codex ignore both, and leave after 300 s: for them it occasionally sends an event that changes
    nothing.
    """

    media_type = sse.MEDIA_TYPE

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        api_format: ApiFormat = ApiFormat.OPENAI,
        request_id: str | None = None,
        sign_of_life: Callable[[], bytes] | None = None,
    ) -> None:
        """``sign_of_life`` returns an event that changes nothing; None if keep-alives are enough."""
        self._events = events
        self._sign_of_life = sign_of_life
        self._keep_alive = sse.PING if api_format is ApiFormat.ANTHROPIC else sse.KEEP_ALIVE
        super().__init__(
            _guarded(events, api_format, request_id),
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get(IS_HEAD):
            await self._events.aclose()
            await Response(headers=dict(self.headers), media_type=self.media_type)(scope, receive, send)
            return
        wire = _Wire(send, self._keep_alive, self._sign_of_life)
        interval_s = scope["app"].state.server.sse_keep_alive_s
        keeping = None if interval_s is None else asyncio.create_task(wire.keep_alive(interval_s))
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, wire.send)
        finally:
            if keeping is not None:
                keeping.cancel()


class _Wire:
    """The connection that a response is written to, watched for silence."""

    def __init__(self, send: Send, keep_alive: bytes, sign_of_life: Callable[[], bytes] | None) -> None:
        self._send = send
        self._keep_alive = keep_alive
        self._sign_of_life = sign_of_life
        self._now = asyncio.get_running_loop().time
        self._started = False
        self._has_spoken = False
        """Whether an event has been sent; before that only a comment is a valid keep-alive."""
        self._complete = False
        self._sending = asyncio.Lock()
        """Held while anything waits for a client that does not read: nothing else may be sent in between, and
        an event that a sign of life follows comes before it."""
        self._sent_at = self._event_at = self._now()
        """When anything was last sent, and when an event that clients count."""

    async def send(self, message: Message) -> None:
        self._complete = self._started and not message.get("more_body", False)
        async with self._sending:
            await self._send(message)
        self._has_spoken = self._started
        self._started = True
        self._sent_at = self._event_at = self._now()

    async def keep_alive(self, interval_s: float) -> None:
        """Sends keep-alives from a separate task, so events cost no more."""
        while not self._complete:
            silence_s = self._now() - self._sent_at
            if silence_s < interval_s:
                await asyncio.sleep(interval_s - silence_s)
            elif self._started and not self._sending.locked():
                async with self._sending:
                    sign = self._sign(interval_s)
                    await self._send({"type": "http.response.body", "body": sign, "more_body": True})
                self._sent_at = self._now()
            else:
                await asyncio.sleep(interval_s)

    def _sign(self, interval_s: float) -> bytes:
        """A keep-alive, or an event if there was none for a while."""
        silence_s = self._now() - self._event_at
        if self._sign_of_life is not None and silence_s >= min(EVENT_S, KEEP_ALIVES * interval_s):
            self._event_at = self._now()
            return self._sign_of_life()
        return self._keep_alive if self._has_spoken else sse.KEEP_ALIVE


async def _guarded(
    events: AsyncGenerator[bytes, None], api_format: ApiFormat, request_id: str | None
) -> AsyncGenerator[bytes, None]:
    try:
        async for event in events:
            yield event
    except Exception as error:  # the status was sent already: the stream itself must report it
        described = describe(error, api_format, request_id)
        yield sse.event(described, "error" if api_format is ApiFormat.ANTHROPIC else None)
    if api_format is ApiFormat.OPENAI:
        yield sse.DONE

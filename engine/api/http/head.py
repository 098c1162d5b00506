"""HEAD is answered as GET would be, without the content (RFC 9110, 9.3.2): probes ask so."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

IS_HEAD = "continuum.is_head"
"""In the scope of such a request; a stream of events then has none."""


class HeadRequests:
    """Shows HEAD to the application as GET. The server leaves the content out."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", IS_HEAD: True}
        await self._app(scope, receive, send)

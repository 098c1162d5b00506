"""Answers HEAD like GET without the content (RFC 9110, 9.3.2); probes use it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

IS_HEAD = "continuum.is_head"
"""Scope key of a HEAD request; its event streams are empty."""


class HeadRequests:
    """Presents HEAD to the application as GET. The server omits the content."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", IS_HEAD: True}
        await self._app(scope, receive, send)

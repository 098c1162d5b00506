"""Tells clients of keys with quotas what is left, so that they slow down before they are refused."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.http.auth import OWNER_HEADER
from engine.api.tenants.quotas import Quotas


class QuotaHeaders:
    """Adds ``x-ratelimit-*`` to the answers to POST, refusals among them."""

    def __init__(self, app: ASGIApp, quotas: Quotas) -> None:
        self._app = app
        self._quotas = quotas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        owner = Headers(scope=scope).get(OWNER_HEADER) if scope["type"] == "http" else None
        meter = self._quotas.meter(owner)
        if meter is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return

        async def send_with_quota(message: Message) -> None:
            if message["type"] == "http.response.start":
                told = [(name.encode(), value.encode()) for name, value in meter.headers().items()]
                message["headers"] = [*message.get("headers", ()), *told]
            await send(message)

        await self._app(scope, receive, send_with_quota)

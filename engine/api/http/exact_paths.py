"""Finds the endpoint of a path without placeholders at once: the framework's own way there is a good part of
what a short request costs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]
"""Answers whatever comes: an error is an answer too."""


class ExactPaths:
    """An application in front of another, which gets all that is not for one of these routers' endpoints."""

    def __init__(self, app: FastAPI, routers: Iterable[APIRouter]) -> None:
        """The routers hold nothing but endpoints, and are among those of ``app``."""
        self._app = app
        self._endpoints: dict[tuple[str, str], Endpoint] = {
            (method, route.path): route.endpoint
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and not route.param_convertors
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        scope["app"] = self._app
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

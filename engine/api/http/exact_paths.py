"""Looks up paths without placeholders in a dict: the framework's routing is a large part of the cost of a
short request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]
"""An endpoint, which also converts its errors to responses."""


class ExactPaths:
    """An application in front of another one, which gets all requests for paths that are not in these
    routers."""

    def __init__(self, app: FastAPI, routers: Iterable[APIRouter]) -> None:
        """The routers must contain only endpoints, and be among those of ``app``."""
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

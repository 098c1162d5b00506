"""The web application: maps paths to modules, with the middleware around all of them.

It is built from an engine and does not know sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from engine.api.anthropic import endpoints as messages
from engine.api.config import ServerConfig
from engine.api.dashboard import endpoints as dashboard
from engine.api.dashboard.audience import Viewers
from engine.api.endpoints import answer_error
from engine.api.http.access_log import AccessLog, AccessLogMiddleware
from engine.api.http.auth import AuthMiddleware
from engine.api.http.content_encoding import ContentEncodingMiddleware
from engine.api.http.exact_paths import ExactPaths
from engine.api.http.head import HeadRequests
from engine.api.http.hosts import HostMiddleware
from engine.api.http.middleware import BodyLimitMiddleware, OriginMiddleware, RequestIdMiddleware
from engine.api.http.unknown_paths import allowed_methods, unknown_path_message, wrong_method_message
from engine.api.lora import endpoints as lora
from engine.api.openai import chat, completions, generate, models, render, tokens
from engine.api.openai_responses import conversation_items, conversations
from engine.api.openai_responses import endpoints as responses
from engine.api.openai_responses.keeper import ResponseKeeper
from engine.api.openapi import describe_api
from engine.api.operators import jobs, operations, tracing
from engine.api.pooling import endpoints as pooling
from engine.api.prompt_cache.fingerprint_store import FingerprintStore
from engine.api.service.server import Server
from engine.api.tenants import endpoints as tenants
from engine.api.tenants.quota_headers import QuotaHeaders
from engine.version import package_version

ROUTERS = (
    chat.router,
    completions.router,
    models.router,
    lora.router,
    tokens.router,
    render.router,
    generate.router,
    pooling.router,
    jobs.router,
    operations.router,
    tracing.router,
    tenants.router,
    messages.router,
    responses.router,
    conversations.router,
    conversation_items.router,
)


def create_app(server: Server) -> ASGIApp:
    """Builds the application of one served model."""
    routers = (*ROUTERS, dashboard.router) if server.config.dashboard else ROUTERS
    return _guarded(HeadRequests(ExactPaths(_described(server, routers), routers)), server)


def _described(server: Server, routers: Sequence[APIRouter]) -> FastAPI:
    """All endpoints, with their OpenAPI description."""
    app = FastAPI(title="continuum", version=package_version())
    app.state.server = server
    app.state.audience = Viewers(server)
    app.state.fingerprints = FingerprintStore(server.siblings)
    app.state.response_keeper = ResponseKeeper.create(server.config.responses, server.siblings)
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(HTTPException, _http_error)
    _describe(app, server.config)
    return app


def _describe(app: FastAPI, config: ServerConfig) -> None:
    """Builds ``/openapi.json`` when it is first requested."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            names = config.served_model_names
            needs_key = config.access.needs_key
            app.openapi_schema = describe_api(app, model_names=names, needs_key=needs_key)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _guarded(app: ASGIApp, server: Server) -> ASGIApp:
    """Adds the middleware. The last one added receives a request first."""
    config = server.config
    limits = config.limits
    access = config.access
    app = ContentEncodingMiddleware(app, max_bytes=limits.max_body_bytes)
    app = BodyLimitMiddleware(app, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s)
    app = OriginMiddleware(app, allowed=access.allowed_origins)
    if server.quotas is not None:
        app = QuotaHeaders(app, server.quotas)
    app = AuthMiddleware(app, keys=server.keys)
    if access.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=access.allowed_origins,
            allow_methods=access.allowed_methods,
            allow_headers=access.allowed_headers,
            allow_credentials=access.allow_credentials,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
    hosts = config.hosts
    if hosts is not None:
        app = HostMiddleware(app, allowed=hosts)
    if access.access_log is not None:
        app = AccessLogMiddleware(app, AccessLog(access.access_log))
    return RequestIdMiddleware(app)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers requests that the framework refuses: an unknown path, or a method that the path does not
    accept."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        error = HTTPException(404, unknown_path_message(request.scope, _public_routes()))
    elif error.status_code == 405:
        allowed = allowed_methods(request.scope, _public_routes())
        error = HTTPException(
            405, wrong_method_message(request.scope, allowed), {"Allow": ", ".join(allowed)}
        )
    return answer_error(request, error)


def _public_routes() -> list[APIRoute]:
    return [route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)]

"""/trace: reports whether the scheduler's trace is written, and turns it on and off."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, read_body, server_of

router = APIRouter()


class TraceBody(BaseModel):
    """Body of POST /trace."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool
    name: str | None = None
    """File name in the folder of --trace-dir; by default it is made from the time."""


@endpoint(router, "GET", "/trace", operators_only=True)
async def show_trace(request: Request) -> Response:
    """Reports whether a trace is being written, to which file, and how much of it."""
    return json_response(await server_of(request).engine.trace_state())


@endpoint(router, "POST", "/trace", body=TraceBody, operators_only=True)
async def switch_trace(request: Request) -> Response:
    """Starts or stops the trace; returns its new state. Existing files are never replaced."""
    body = await read_body(request, TraceBody)
    return json_response(await server_of(request).engine.switch_trace(body.enabled, body.name))

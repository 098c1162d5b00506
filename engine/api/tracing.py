"""/trace: whether the scheduler's trace is written, and to switch it while the server runs."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, model_of, read_body

router = APIRouter()


class TraceBody(BaseModel):
    """Body of POST /trace."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool
    name: str | None = None
    """File to write, in the folder that the operator named with --trace-dir; a name with the time without."""


@endpoint(router, "GET", "/trace", operators_only=True)
async def show_trace(request: Request) -> Response:
    """Whether a trace is being written, to which file, and how much of it."""
    return json_response(await model_of(request).engine.trace_state())


@endpoint(router, "POST", "/trace", body=TraceBody, operators_only=True)
async def switch_trace(request: Request) -> Response:
    """Begin a trace, or end it; the state it has then. No file that is there is replaced."""
    body = await read_body(request, TraceBody)
    return json_response(await model_of(request).engine.switch_trace(body.enabled, body.name))

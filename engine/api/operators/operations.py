"""Endpoints for operators: health, version, load, metrics, prefix cache reset, pause."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from engine.api.endpoints import endpoint, json_response, read_body, server_of
from engine.core.scheduler_report import PauseState
from engine.core_process.client_protocols import EngineState
from engine.errors import EngineGenerateError, RequestError
from engine.records.door import Door
from engine.records.handed_over import HandedOver
from engine.version import package_version

router = APIRouter()

PAUSE_MODES = ("wait", "keep")
DRAIN_PARAMS = ("engine", "deadline_s", "wait", "off")
MAX_DIGITS = 9
MAX_DEADLINE_S = 86_400


class DrainState(EngineState, kw_only=True):
    """The answer of ``/drain``."""

    moved: HandedOver | UnsetType = UNSET
    """What was handed over, where the caller waited for it."""


class ServerDrained(msgspec.Struct, kw_only=True):
    """The answer of ``/drain`` for the whole server."""

    state: Literal["up", "draining", "drained"]
    """``draining``: takes turns of known jobs only; ``drained``: takes no requests."""
    moved: HandedOver | UnsetType = UNSET
    """What was handed over, where the caller waited for it."""


class EngineList(msgspec.Struct, kw_only=True):
    """The answer of ``/engines``."""

    object: Literal["list"] = "list"
    data: list[EngineState]
    server: Literal["up", "draining", "drained"]
    """Whether the server takes all requests, turns of known jobs only, or none."""


@endpoint(router, "GET", "/health", "/ping")
async def health(request: Request) -> Response:
    """200 while the engine is alive and requests are accepted, else 503."""
    await server_of(request).check_health()
    return Response()


@endpoint(router, "POST", "/ping")
async def ping(request: Request) -> Response:
    """The same, for load balancers that send POST."""
    return await health(request)


_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>continuum</title>
<body style="font:1rem/1.6 system-ui;max-width:40rem;margin:3rem auto;padding:0 1rem;color-scheme:light dark">
<h1>continuum</h1><p>An LLM server for agents. Programs talk to it over the APIs of OpenAI and Anthropic:
their base URL is this address, with <code>/v1</code> for OpenAI's.</p>
<ul><li><a href="dashboard">dashboard</a>: jobs, KV cache and decisions, live</li>
<li><a href="v1/models">models</a> that are served</li>
<li><a href="health">health</a>, <a href="metrics">metrics</a>,
<a href="openapi.json">description of the API</a></li></ul></body></html>
"""


@endpoint(router, "GET", "/")
async def root(request: Request) -> Response:
    """Names this server and its API description; a browser gets a page with links."""
    if "text/html" in request.headers.get("accept", ""):
        return HTMLResponse(_PAGE)
    return JSONResponse(
        {
            "name": "continuum",
            "version": package_version(),
            "description": "An LLM server for agents, with the APIs of OpenAI and Anthropic.",
            "endpoints": {
                "chat": "/v1/chat/completions",
                "responses": "/v1/responses",
                "messages": "/v1/messages",
                "completions": "/v1/completions",
                "models": "/v1/models",
                "jobs": "/v1/jobs",
                "capacity": "/v1/capacity",
                "health": "/health",
                "dashboard": "/dashboard",
                "metrics": "/metrics",
                "description": "/openapi.json",
            },
        }
    )


@endpoint(router, "GET", "/version")
async def version(request: Request) -> Response:
    """The version of this server."""
    return JSONResponse({"version": package_version()})


@endpoint(router, "GET", "/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus series."""
    return Response(await server_of(request).metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


@endpoint(router, "GET", "/load", operators_only=True)
async def load(request: Request) -> Response:
    """The number of running requests, over all API server processes, and the id of the process that
    answers."""
    return JSONResponse({"server_load": server_of(request).num_live, "process_id": os.getpid()})


@endpoint(router, "POST", "/reset_prefix_cache", operators_only=True)
async def reset_prefix_cache(request: Request) -> Response:
    """Evicts all cached prefixes, pinned ones too; refused while requests run."""
    return JSONResponse({"success": await server_of(request).engine.reset_prefix_cache()})


@endpoint(router, "POST", "/reset_mm_cache", operators_only=True)
async def reset_mm_cache(request: Request) -> Response:
    """Drops cached media: the encoders' outputs, and the files in this API server process that no request
    uses."""
    server = server_of(request)
    if server.media is not None:
        server.media.store.clear()
        await server.engine.reset_encoder_cache()
    return JSONResponse({"success": True})


@endpoint(router, "POST", "/pause", operators_only=True)
async def pause(request: Request) -> Response:
    """Admits no request from the queue until ``/resume``. ``mode=wait``: running requests finish;
    ``mode=keep``: they stop, and continue after it. New requests are accepted and wait."""
    mode = request.query_params.get("mode", "wait")
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode[:40]!r}.", "mode")
    await server_of(request).engine.pause(running_too=mode == "keep")
    return JSONResponse({"status": "paused"})


@endpoint(router, "POST", "/resume", operators_only=True)
async def resume(request: Request) -> Response:
    """Ends the pause."""
    await server_of(request).engine.resume()
    return JSONResponse({"status": "resumed"})


@endpoint(router, "POST", "/sleep", operators_only=True)
async def sleep(request: Request) -> Response:
    """Frees memory once running requests have ended: ``level=1`` that of the KV pool, ``level=2`` that of the
    weights, too. New requests are accepted and wait for ``/wake_up``."""
    level = request.query_params.get("level", "1")
    mode = request.query_params.get("mode", "wait")
    if level not in ("1", "2"):
        raise RequestError(f"level must be 1 or 2, got {level[:40]!r}.", "level")
    if mode != "wait":
        raise RequestError(f"mode must be wait, got {mode[:40]!r}: running requests are not aborted.", "mode")
    await _resting(server_of(request).engine.sleep(int(level)), "level")
    return JSONResponse({"status": "sleeping"})


@endpoint(router, "POST", "/wake_up", operators_only=True)
async def wake_up(request: Request) -> Response:
    """Ends the sleep: loads dropped weights again, and runs waiting requests."""
    await _resting(server_of(request).engine.wake_up(), "level")
    return JSONResponse({"status": "awake"})


@endpoint(router, "GET", "/is_sleeping", operators_only=True)
async def is_sleeping(request: Request) -> Response:
    """Reports whether the engine sleeps, and at which level."""
    level = await server_of(request).engine.sleep_level()
    return JSONResponse({"is_sleeping": level > 0, "level": level})


class UpdateWeightsRequest(BaseModel):
    """Body of POST /update_weights."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A model folder of the same architecture."""


@endpoint(router, "POST", "/update_weights", body=UpdateWeightsRequest, operators_only=True)
async def update_weights(request: Request) -> Response:
    """Serves the weights of another folder of the same architecture once running requests have ended; all
    cached prefixes are evicted. On failure the weights stay unchanged."""
    body = await read_body(request, UpdateWeightsRequest)
    await _resting(server_of(request).engine.update_weights(body.path), "path")
    return JSONResponse({"status": "updated"})


async def _resting(work: Awaitable[None], field: str) -> None:
    """Waits for the work; an error of the engine becomes the client's error."""
    try:
        await work
    except EngineGenerateError as error:
        raise RequestError(str(error), field) from error


@endpoint(router, "GET", "/engines", operators_only=True)
async def engines(request: Request) -> Response:
    """Lists the engine cores of this server: which are up, and how much work each has."""
    engine = server_of(request).engine
    states = await engine.engine_states()
    return json_response(EngineList(data=states, server=_STATES[await engine.door()]))


@endpoint(router, "POST", "/drain", operators_only=True)
async def drain(request: Request) -> Response:
    """Drains the core ``engine``, or without it the server: new jobs go to other cores, or are refused with
    503, and for up to ``deadline_s`` seconds (0) turns of known jobs still come. Then it finishes its
    requests, and hands over what its pins hold, if there is a folder for that. ``wait=true`` answers when
    that is done; ``off=true`` ends the drain."""
    params = request.query_params
    for name in params:
        if name not in DRAIN_PARAMS:  # a misspelt engine must not drain the server
            raise RequestError(f"{name[:40]!r} is unknown; choose from {', '.join(DRAIN_PARAMS)}.", name[:40])
    if "engine" not in params:
        return json_response(await _drain_server(request))
    number = params["engine"]
    if not number.isdecimal() or len(number) > MAX_DIGITS:
        raise RequestError(f"engine must be the number of an engine core, got {number[:40]!r}.", "engine")
    deadline_s = _seconds(params.get("deadline_s", "0"))
    waits, ends = (_flag(params.get(name, "false"), name) for name in ("wait", "off"))
    engine = server_of(request).engine
    moved: HandedOver | None = None
    if ends:
        await engine.end_drain(int(number))
    else:
        draining = engine.drain(int(number), deadline_s)
        if waits:
            await asyncio.wait({draining})
            moved = None if draining.cancelled() else draining.result()
    state = (await engine.engine_states())[int(number)]
    return json_response(DrainState(**msgspec.structs.asdict(state), moved=moved or UNSET))


async def _drain_server(request: Request) -> ServerDrained:
    params = request.query_params
    deadline_s = _seconds(params.get("deadline_s", "0"))
    waits, ends = (_flag(params.get(name, "false"), name) for name in ("wait", "off"))
    engine = server_of(request).engine
    if ends:
        await engine.end_drain_of_server()
        return ServerDrained(state="up")
    draining = await engine.drain_server(deadline_s)
    if not waits:
        return ServerDrained(state="draining")
    await asyncio.wait({draining})
    moved = None if draining.cancelled() else draining.result()
    # Somebody else may have ended this drain, or have begun another one.
    return ServerDrained(state=_STATES[await engine.door()], moved=moved or UNSET)


_STATES: dict[Door, Literal["up", "draining", "drained"]] = {
    Door.OPEN: "up",
    Door.LEAVING: "draining",
    Door.CLOSED: "drained",
}


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_DEADLINE_S:
        raise RequestError(
            f"deadline_s must be a number of seconds from 0 to {MAX_DEADLINE_S}, got {given[:40]!r}.",
            "deadline_s",
        )
    return seconds


def _flag(given: str, name: str) -> bool:
    if given not in ("true", "false"):
        raise RequestError(f"{name} must be true or false, got {given[:40]!r}.", name)
    return given == "true"


@endpoint(router, "GET", "/is_paused", operators_only=True)
async def is_paused(request: Request) -> Response:
    """Reports whether the engine is paused, why, and how many requests run and wait."""
    state = await server_of(request).engine.statistics()
    reasons = await server_of(request).engine.why_paused()
    return JSONResponse(
        {
            "is_paused": state.pause_state != PauseState.UNPAUSED.value,
            "reasons": reasons,
            "num_running": state.num_running,
            "num_waiting": state.num_waiting,
        }
    )

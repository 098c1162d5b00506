"""``/dashboard`` and its data: private to the page, may change with it, and not in the API description."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from engine.api.dashboard.audience import PERIOD_S, Viewers
from engine.api.dashboard.page import dashboard_page
from engine.api.endpoints import endpoint, json_response, server_of
from engine.api.errors import ApiFormat
from engine.api.http import sse
from engine.api.http.connection import EventStream
from engine.api.http.streams import begun
from engine.records.messages import JobStatus, PastTurn
from engine.version import package_version

router = APIRouter(include_in_schema=False)


class Hello(msgspec.Struct, kw_only=True):
    """The first event of the feed, which identifies the engine."""

    object: Literal["dashboard.hello"] = "dashboard.hello"
    model: str
    version: str
    core: int
    """The core's id; a different one means a new engine without history."""
    knows_jobs: bool
    """Whether the policy tracks jobs, and so may retain their KV."""
    block_size: int
    period_s: float


class JobLife(msgspec.Struct, kw_only=True):
    """Details of a job that a reader has selected."""

    object: Literal["dashboard.job"] = "dashboard.job"
    job: JobStatus | None
    """The job; None if it has finished, was forgotten, or the policy tracks no jobs."""
    past_turns: list[PastTurn]
    """Its remembered past turns, also of a finished job."""


@endpoint(router, "GET", "/dashboard")
async def dashboard(request: Request) -> Response:
    """The page."""
    page = dashboard_page()
    return HTMLResponse(page.html, headers=page.headers)


@endpoint(router, "GET", "/dashboard/feed", operators_only=True)
async def feed(request: Request) -> Response:
    """The page's data as server-sent events: one ``hello``, then ``view`` after ``view``."""
    audience: Viewers = request.app.state.audience
    views = await begun(audience.views())  # an error is an HTTP status
    return EventStream(_events(_hello(request), views), ApiFormat.RESPONSES, request.state.request_id)


@endpoint(router, "GET", "/dashboard/jobs/{job_id:path}", operators_only=True)
async def job(request: Request) -> Response:
    """One job as in ``/v1/jobs``, and its turns; an unknown job is not an error."""
    engine = server_of(request).engine
    job_id = request.path_params["job_id"]
    known = await engine.job(job_id) if engine.knows_jobs else None
    return json_response(JobLife(job=known, past_turns=await engine.past_turns(job_id)))


def _hello(request: Request) -> Hello:
    engine = server_of(request).engine
    return Hello(
        model=server_of(request).name,
        version=package_version(),
        core=engine.core_pid,
        knows_jobs=engine.knows_jobs,
        block_size=engine.ready.block_size,
        period_s=PERIOD_S,
    )


async def _events(hello: Hello, views: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(views):
        yield sse.event(hello, "hello")
        async for view in views:
            yield b"event: view\ndata: " + view + b"\n\n"

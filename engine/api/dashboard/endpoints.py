"""``/dashboard`` and what it reads: all of it the page's own, which changes with it, and in no document."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from engine.api.dashboard.audience import PERIOD_S, Audience
from engine.api.dashboard.page import dashboard_page
from engine.api.endpoints import endpoint, json_response, model_of
from engine.api.errors import Dialect
from engine.api.http import sse
from engine.api.http.connection import EventStream
from engine.api.http.streams import begun
from engine.messages import JobStatus, PastTurn
from engine.version import package_version

router = APIRouter(include_in_schema=False)


class Hello(msgspec.Struct, kw_only=True):
    """First event of the feed: whose it is."""

    object: Literal["dashboard.hello"] = "dashboard.hello"
    model: str
    version: str
    core: int
    """Another number: another engine, of which nothing is known yet."""
    knows_jobs: bool
    """Whether the policy knows jobs, and so may hold something for them."""
    block_size: int
    period_s: float


class JobLife(msgspec.Struct, kw_only=True):
    """A job that a reader of the page has clicked."""

    object: Literal["dashboard.job"] = "dashboard.job"
    job: JobStatus | None
    """None: it has finished, was forgotten, or the policy knows no jobs."""
    past_turns: list[PastTurn]
    """Also of a job that has finished, as far as they are remembered."""


@endpoint(router, "GET", "/dashboard")
async def dashboard(request: Request) -> Response:
    """The page."""
    page = dashboard_page()
    return HTMLResponse(page.html, headers=page.headers)


@endpoint(router, "GET", "/dashboard/feed", operators_only=True)
async def feed(request: Request) -> Response:
    """What the page shows, as server-sent events: one ``hello``, then ``view`` after ``view``."""
    audience: Audience = request.app.state.audience
    views = await begun(audience.views())  # a refusal is an HTTP status
    return EventStream(_events(_hello(request), views), Dialect.RESPONSES, request.state.request_id)


@endpoint(router, "GET", "/dashboard/jobs/{job_id:path}", operators_only=True)
async def job(request: Request) -> Response:
    """One job as ``/v1/jobs`` tells of it, and its turns; that it is not known is no error of who saw it."""
    engine, job_id = model_of(request).engine, request.path_params["job_id"]
    known = await engine.job(job_id) if engine.knows_jobs else None
    return json_response(JobLife(job=known, past_turns=await engine.past_turns(job_id)))


def _hello(request: Request) -> Hello:
    engine = model_of(request).engine
    return Hello(
        model=model_of(request).name,
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

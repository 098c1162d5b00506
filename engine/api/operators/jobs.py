"""/v1/jobs and /v1/capacity: the engine's view of agents' jobs, and signals from their clients."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, read_body, server_of, whole_number
from engine.api.errors import NotFoundError
from engine.api.service.identity import MAX_ID_CHARS, owned_id, owner_of
from engine.errors import RequestError
from engine.frontend.async_llm import AsyncLLM
from engine.records.messages import JobStatus, ToolSignal, ToolState

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
MAX_SECONDS = 1e7
"""Maximum seconds that a signal may state, about four months."""

router = APIRouter()

Name = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]


class SignalBody(BaseModel):
    """Body of POST /v1/jobs/{id}/signals: the new state of one tool call, or of all calls of a turn."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    state: ToolState
    request_id: Name | None = None
    """The id of the turn's response; None means the job's latest turn."""
    call_id: Name | None = None
    tool: Name | None = None
    expected_s: Seconds | None = None
    remaining_s: Seconds | None = None
    fraction: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _check_numbers(self) -> SignalBody:
        if self.state in (ToolState.FINISHED, ToolState.CANCELLED):
            for name in ("expected_s", "remaining_s"):
                if getattr(self, name):
                    raise RequestError(f"{name} must be 0 or left out: the call is {self.state.value}.", name)
        return self

    def signal(self, job_id: str) -> ToolSignal:
        return ToolSignal(
            job_id,
            self.state,
            request_id=self.request_id,
            call_id=self.call_id,
            tool=self.tool,
            expected_s=self.expected_s,
            remaining_s=self.remaining_s,
            fraction=self.fraction,
        )


class JobList(msgspec.Struct, kw_only=True):
    """Answer of GET /v1/jobs."""

    object: Literal["list"] = "list"
    data: list[JobStatus]


class JobTree(msgspec.Struct, kw_only=True):
    """Answer of GET /v1/jobs/{id}/tree: a job, and its sub-agents' trees."""

    object: Literal["job.tree"] = "job.tree"
    job: JobStatus
    children: list[JobTree]


class FinishedJob(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/jobs/{id}/finish."""

    id: str
    object: Literal["job"] = "job"
    finished: Literal[True] = True


@endpoint(router, "GET", "/v1/capacity", operators_only=True)
async def show_capacity(request: Request) -> Response:
    """Shows how many more jobs like the recent ones fit now, and what begun jobs are expected to need."""
    capacity = await _engine_with_jobs(request).capacity()
    if capacity is None:
        raise HTTPException(501, "The scheduling policy does not tell how many jobs fit.")
    return json_response(capacity)


@endpoint(router, "GET", "/v1/jobs")
async def list_jobs(request: Request) -> Response:
    """Lists ``limit`` jobs, the most recently active first. An API key with a name sees only its owner's
    jobs."""
    limit = whole_number(request, "limit", DEFAULT_LIMIT, 1, MAX_LIMIT)
    jobs = await _engine_with_jobs(request).jobs(limit, owner_of(request.headers))
    return json_response(JobList(data=jobs))


@endpoint(router, "GET", "/v1/jobs/{job_id:path}/tree")
async def show_tree(request: Request) -> Response:
    """Shows a job and the jobs that it waits for, or has waited for, and theirs: at most 1000."""
    engine = _engine_with_jobs(request)
    left = MAX_LIMIT

    async def tree_of(job: JobStatus) -> JobTree:
        nonlocal left
        left -= 1
        children = list[JobTree]()
        for child_id in job.children:
            child = await engine.job(child_id) if left > 0 else None
            if child is not None and child.parent == job.id:
                children.append(await tree_of(child))
        return JobTree(job=job, children=children)

    return json_response(await tree_of(await _job(request)))


@endpoint(router, "GET", "/v1/jobs/{job_id:path}")
async def show_job(request: Request) -> Response:
    """Shows one job: its turns, its retained KV and for how long, and when its next turn is expected."""
    return json_response(await _job(request))


@endpoint(router, "POST", "/v1/jobs/{job_id:path}/signals", body=SignalBody)
async def signal_job(request: Request) -> Response:
    """Reports that a tool call started, makes progress, finished or was cancelled. Returns the
    job's new state."""
    body = await read_body(request, SignalBody)
    job = await _job(request)
    _check_turn(job, body.request_id)
    await _engine_with_jobs(request).tool_signal(body.signal(job.id))
    return json_response(await _job(request))


@endpoint(router, "POST", "/v1/jobs/{job_id:path}/finish")
async def finish_job(request: Request) -> Response:
    """Reports that the job has no more turns, nor those that it waited for: retained KV is released."""
    job = await _job(request)
    await _engine_with_jobs(request).finish_job(job.id)
    return json_response(FinishedJob(id=job.id))


def _engine_with_jobs(request: Request) -> AsyncLLM:
    engine = server_of(request).engine
    if not engine.knows_jobs:
        raise HTTPException(
            501,
            "The scheduling policy does not track jobs; start the server with --scheduling-policy continuum.",
        )
    return engine


async def _job(request: Request) -> JobStatus:
    """Returns the job that the path names: of the key's owner, or of any owner for a key without a name."""
    engine = _engine_with_jobs(request)
    job_id = request.path_params["job_id"]
    own_id = owned_id(request.headers, job_id)
    job = await engine.job(own_id)
    if job is None and owner_of(request.headers) is None and own_id != job_id:
        job = await engine.job(job_id)
    if job is None:
        raise NotFoundError(
            f"The job `{job_id[:200]}` is not known: it never had a turn here, has finished, or was idle for "
            "too long.",
            "job_id",
        )
    return job


def _check_turn(job: JobStatus, request_id: str | None) -> None:
    """Checks that the turn has ended and that no other turn has continued it."""
    if not job.branches:
        raise NotFoundError("The job has no turn whose tools could be running.", "request_id")
    if request_id is not None and all(each.request_id != request_id for each in job.branches):
        raise NotFoundError(
            f"The job has no turn `{request_id[:200]}` whose tools could be running.", "request_id"
        )

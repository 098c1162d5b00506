"""Requests as a drafter sees them: tokens, a job, and its tenant."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.kv_cache.block_hash import BlockHasher
from engine.core.request import Request
from engine.records.messages import JobRef
from engine.records.sampling_params import SamplingParams

BLOCK_SIZE = 4


def make_request(
    request_id: str,
    prompt: Sequence[int],
    output: Sequence[int] = (),
    *,
    job: str | None = None,
    tenant: str | None = None,
    owner: str | None = None,
    salt: str | None = None,
) -> Request:
    """A request with this ``output``; its last token is not computed."""
    ref = JobRef(job_id=job, tenant=tenant, owner=owner)
    params = SamplingParams(max_tokens=1 << 20)
    hasher = BlockHasher(BLOCK_SIZE)
    request = Request(request_id, list(prompt), params, 0.0, cache_salt=salt, job=ref, block_hasher=hasher)
    say(request, output)
    return request


def say(request: Request, tokens: Sequence[int]) -> None:
    """Appends output, all of it computed except the last token."""
    for token in tokens:
        request.append_output_token(token)
    request.num_computed_tokens = request.num_tokens - 1


def job_of(request: Request) -> str | None:
    """The job that the request's client named."""
    return request.job.job_id if request.job is not None else None

"""Jobs that move between cores: what one tells of a paused branch, and how another takes it up.

The turn that continues the branch brings the record (``JobRef.moved``), so that a replay sees it with the
turn. Its KV comes another way.
"""

from __future__ import annotations

from continuum.jobs.branches import Branches
from continuum.jobs.continuation import continuation_of, num_blocks_to_share
from continuum.jobs.job import BranchTip, Job
from continuum.jobs.registry import JobRegistry
from engine.core.policy import PinEnd
from engine.core.request import Request
from engine.records.block_chain import BlockChain
from engine.records.messages import JobRef
from estimator.tool_key import ToolKey
from tracing.events import MovedTurn


def moved_turn(tip: BranchTip, block_size: int, now: float) -> MovedTurn:
    """What is known of a tip that a turn on another core will continue."""
    job = tip.job
    return MovedTurn(
        job_id=job.job_id,
        request_id=tip.request_id,
        turn=tip.turn_number,
        num_turns=job.num_turns,
        num_blocks=num_blocks_to_share(tip.num_prompt_tokens, block_size),
        num_prompt_tokens=tip.num_prompt_tokens,
        elapsed_s=max(0.0, now - tip.ended_s),
        age_s=max(0.0, now - job.first_arrival_s),
        queued_s=job.queued_s,
        is_inferred=job.is_inferred,
        external_id=tip.external_id,
        tools=None if tip.tools is None else [str(tool) for tool in tip.tools],
        prompt_tail=list(tip.prompt_tail or ()),
        num_replies=tip.num_replies,
        num_results=tip.num_results,
        num_output_tokens=tip.num_output_tokens,
        num_task_tokens=tip.num_task_tokens,
    )


def take_up(jobs: JobRegistry, branches: Branches, request: Request, block_size: int, now: float) -> None:
    """Remembers the job and the branch that the request continues, as if its last turn had run here.

    Does nothing if this turn or a later one did, if the request names another job, or if its prompt only
    begins like that turn's.
    """
    assert request.job is not None
    moved = request.job.moved
    if moved is None or not (moved.is_inferred or request.job.job_id == moved.job_id):
        return
    known = jobs.get(moved.job_id)
    if known is not None and known.num_turns >= moved.num_turns:
        return
    tip = _tip(known or _job(request.job, moved, now), request, moved, now)
    if continuation_of([tip], request, block_size).tip is None:
        return
    jobs.take_up(tip.job, moved.num_turns, now)
    branches.take_up(tip, request.block_hashes[: moved.num_blocks], now)
    if moved.tools is not None:
        tip.tools = [ToolKey.parse(tool) for tool in moved.tools]
        branches.tools_known(tip, now)


def _job(named: JobRef, moved: MovedTurn, now: float) -> Job:
    began_s = now - moved.age_s
    job = Job(moved.job_id, named.tenant, began_s, began_s, now)
    job.owner = named.owner
    job.is_inferred = moved.is_inferred
    job.queued_s = moved.queued_s
    return job


def _tip(job: Job, request: Request, moved: MovedTurn, now: float) -> BranchTip:
    return BranchTip(
        job,
        moved.request_id,
        moved.turn,
        BlockChain(request.block_hashes[: moved.num_blocks]).followed_by(moved.more_blocks),
        moved.num_prompt_tokens,
        ended_s=now - moved.elapsed_s,
        place=job.place,
        pin_ended=PinEnd.HANDED_OVER,
        external_id=moved.external_id,
        prompt_tail=tuple(moved.prompt_tail),
        num_replies=moved.num_replies,
        num_results=moved.num_results,
        num_output_tokens=moved.num_output_tokens,
        num_task_tokens=moved.num_task_tokens,
    )

"""The status of a job for display: its turns, its pins, and when the next turn is expected."""

from __future__ import annotations

from continuum.jobs.job import BranchTip, Job
from engine.records.messages import BranchStatus, JobStatus, JobUsage
from estimator.survival import SurvivalCurve

EARLY = 0.1
LATE = 0.9
"""Quantiles that show the uncertainty of an expected return."""


def job_status(job: Job, tips: list[BranchStatus], kind: bytes | None, now: float) -> JobStatus:
    """Returns the status of a job. ``tips`` are the statuses of its tips, as of now."""
    ttls_s = [tip.ttl_s for tip in tips if tip.ttl_s is not None]
    returns_s = [each.expected_return_s for each in tips if each.expected_return_s is not None]
    return JobStatus(
        id=job.job_id,
        tenant=job.tenant,
        parent=job.parent_id,
        children=[child.job_id for child in job.children],
        inferred=job.is_inferred,
        kind=kind.hex()[:16] if kind is not None else None,
        turns=job.num_turns,
        open_turns=[turn.external_id for turn in job.turns.values()],
        usage=JobUsage(
            prompt_tokens=job.num_prompt_tokens,
            cached_tokens=job.num_cached_tokens,
            output_tokens=job.num_output_tokens,
            queued_s=job.queued_s,
        ),
        age_s=max(0.0, now - job.first_arrival_s),
        idle_s=max(0.0, now - job.last_active_s),
        pinned_blocks=sum(tip.pinned_blocks for tip in tips),
        ttl_s=max(ttls_s, default=None),
        expected_return_s=min(returns_s, default=None),
        branches=tips,
    )


def tip_status(tip: BranchTip, remaining: SurvivalCurve, block_size: int, now: float) -> BranchStatus:
    """Returns the status of a tip. ``remaining`` is the time until its next turn, from now."""
    pin = tip.pin
    return BranchStatus(
        request_id=tip.external_id,
        turn=tip.turn_number,
        num_tokens=len(tip.chain) * block_size,
        elapsed_s=max(0.0, now - tip.ended_s),
        tools=None if tip.tools is None else [str(tool) for tool in tip.tools],
        pinned_blocks=pin.num_blocks if pin is not None else 0,
        ttl_s=max(0.0, pin.deadline_s - now) if pin is not None else None,
        reason=tip.receipt.reason if tip.receipt is not None else "",
        expected_return_s=remaining.known_quantile(0.5),
        earliest_return_s=remaining.known_quantile(EARLY),
        latest_return_s=remaining.known_quantile(LATE),
        num_observations=remaining.num_observations,
        told=tip.hint.state.value if tip.hint is not None else None,
    )

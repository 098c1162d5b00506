"""Builds a client's receipt of one turn of its job."""

from __future__ import annotations

from continuum.jobs.job import Turn
from engine.records.messages import TurnReceipt


def make_receipt(turn: Turn) -> TurnReceipt:
    """The receipt of a turn that ended, before the pin is decided."""
    tip = turn.tip
    return TurnReceipt(
        request_id=turn.request.request_id,
        job_id=turn.job.job_id,
        turn=turn.number,
        prompt_tokens=turn.request.num_prompt_tokens,
        cached_tokens=turn.num_cached_tokens or 0,
        recomputed_tokens=turn.num_recomputed_tokens,
        previous_pin=tip.pin_ended.value if tip is not None and tip.pin_ended else None,
        gap_s=turn.gap_s,
        asked_ttl_s=None if turn.request.job is None else turn.request.job.asked_ttl_s,
        diverged_at_token=turn.diverged_at_token,
        diverged_tokens=turn.num_diverged_tokens,
        superseded_tokens=turn.num_superseded_tokens,
        prewarmed_tokens=turn.num_prewarmed_tokens,
        output_steps=turn.request.num_output_steps,
        drafted_tokens=turn.request.num_draft_tokens,
        accepted_tokens=turn.request.num_accepted_tokens,
    )

"""The most recently ended turns of all jobs, with their receipts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from continuum.jobs.job import BranchTip, Job, Turn
from engine.records.messages import PastTurn, TurnReceipt

MAX_TURNS = 4096
"""Maximum number of turns; the oldest are dropped."""


@dataclass(slots=True, eq=False)
class _EndedTurn:
    """An ended turn with its latest receipt."""

    job: Job
    request_id: str
    ended_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    num_output_tokens: int
    receipt: TurnReceipt
    tools: list[str] | None = None


class TurnHistory:
    """Keeps a small record per turn; the turns of one job are collected only on request."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, _EndedTurn] = OrderedDict()

    def ended(self, turn: Turn, receipt: TurnReceipt, now: float) -> None:
        request = turn.request
        started_s = now if request.first_scheduled_time is None else request.first_scheduled_time
        first_token_s = now if request.first_token_time is None else request.first_token_time
        self._turns[request.request_id] = _EndedTurn(
            job=turn.job,
            request_id=turn.external_id,
            ended_s=now,
            queue_s=max(0.0, started_s - request.arrival_time),
            prefill_s=first_token_s - started_s,
            decode_s=now - first_token_s,
            num_output_tokens=request.num_output_tokens,
            receipt=receipt,
        )
        if len(self._turns) > MAX_TURNS:
            self._turns.popitem(last=False)

    def receipt_changed(self, tip: BranchTip) -> None:
        """Stores the new receipt of a turn, after its tools became known or its client gave a hint."""
        turn = self._turns.get(tip.request_id)
        if turn is not None and tip.receipt is not None:
            turn.receipt = tip.receipt
            turn.tools = [str(tool) for tool in tip.tools or ()]

    def of_job(self, job_id: str, now: float) -> list[PastTurn]:
        """The remembered turns of a job, oldest first."""
        return [_past_turn(turn, now) for turn in self._turns.values() if turn.job.job_id == job_id]


def _past_turn(turn: _EndedTurn, now: float) -> PastTurn:
    receipt = turn.receipt
    return PastTurn(
        request_id=turn.request_id,
        turn=receipt.turn,
        elapsed_s=now - turn.ended_s,
        queue_s=turn.queue_s,
        prefill_s=turn.prefill_s,
        decode_s=turn.decode_s,
        gap_s=receipt.gap_s,
        prompt_tokens=receipt.prompt_tokens,
        cached_tokens=receipt.cached_tokens,
        recomputed_tokens=receipt.recomputed_tokens,
        output_tokens=turn.num_output_tokens,
        output_steps=receipt.output_steps,
        drafted_tokens=receipt.drafted_tokens,
        accepted_tokens=receipt.accepted_tokens,
        previous_pin=receipt.previous_pin,
        tools=turn.tools,
        pinned_tokens=receipt.pinned_tokens,
        ttl_s=receipt.ttl_s,
        reason=receipt.reason,
    )

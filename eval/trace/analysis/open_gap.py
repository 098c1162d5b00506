"""A gap while its trace is being read: the turn before it, its calls, the turn that ends it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from eval.trace.analysis.jobs import ClientHint, GapLife, TurnLife
from eval.trace.analysis.open_turn import OpenTurn

MAX_BRANCHES = 64
"""Ended turns kept per job, one of which may be continued."""


@dataclass(slots=True, eq=False)
class _OpenGap:
    """A turn that has ended and may be continued."""

    turn: TurnLife
    job_id: str
    tools: tuple[str, ...] | None = None
    told: list[ClientHint] = field(default_factory=list)

    def close(self, ended_s: float | None, next_req_id: str | None) -> GapLife:
        return GapLife(
            job_id=self.job_id,
            req_id=self.turn.req_id,
            number=self.turn.number,
            started_s=self.turn.ended_s,
            ended_s=ended_s,
            next_req_id=next_req_id,
            tools=self.tools,
            told=tuple(self.told),
        )


class GapReader:
    """Passes on each gap when a turn has continued it, or none will."""

    def __init__(self, on_gap: Callable[[GapLife], None]) -> None:
        self._on_gap = on_gap
        self._open: dict[str, dict[str, _OpenGap]] = {}
        """Open gaps by job, then by the request that ended; the latest last."""

    def begin(self, job_id: str, turn: TurnLife) -> None:
        """Opens the gap after an ended turn."""
        gaps = self._open.setdefault(job_id, {})
        gaps[turn.req_id] = _OpenGap(turn, job_id)
        if len(gaps) > MAX_BRANCHES:
            self._on_gap(gaps.pop(next(iter(gaps))).close(None, None))

    def continue_latest(self, turn: OpenTurn, job_id: str, num_shared_tokens: int) -> None:
        """Ends the job's latest gap: if the policy knows no jobs, a turn is assumed to continue the last
        one."""
        gaps = self._open.get(job_id)
        if not gaps:
            return
        _, gap = gaps.popitem()
        before = gap.turn
        num_tokens_before = before.num_prompt_tokens + before.num_output_tokens
        turn.num_known_tokens = min(num_shared_tokens, num_tokens_before)
        self._close(gap, turn, max(0.0, turn.arrived_s - before.ended_s))

    def continue_from(self, turn: OpenTurn, job_id: str, req_id: str | None, gap_s: float | None) -> None:
        """Ends the gap of the turn that the policy names; without ``gap_s`` the new turn repeats that one."""
        gap = self._open.get(job_id, {}).pop(req_id or "", None)
        if gap is None:
            return
        if gap_s is None:
            self._on_gap(gap.close(None, None))
        else:
            self._close(gap, turn, gap_s)

    def _close(self, gap: _OpenGap, turn: OpenTurn, gap_s: float) -> None:
        turn.gap_s = gap_s
        turn.arrived_s = turn.since_s = gap.turn.ended_s + gap_s
        self._on_gap(gap.close(turn.arrived_s, turn.req_id))

    def tools_known(self, job_id: str, req_id: str | None, tools: tuple[str, ...]) -> None:
        """Records the tools; the first report counts."""
        gap = self._open.get(job_id, {}).get(req_id or "")
        if gap is not None and gap.tools is None:
            gap.tools = tools

    def told(self, job_id: str, req_id: str | None, told: ClientHint) -> None:
        """Records a client's signal about the calls."""
        gap = self._open.get(job_id, {}).get(req_id or "")
        if gap is not None:
            gap.told.append(told)

    def forget(self, job_id: str) -> None:
        """Ends the job's gaps, as no turn will follow."""
        for gap in self._open.pop(job_id, {}).values():
            self._on_gap(gap.close(None, None))

    def close(self) -> None:
        """Ends all gaps at the end of the trace."""
        for job_id in list(self._open):
            self.forget(job_id)

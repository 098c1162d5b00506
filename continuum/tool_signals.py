"""Handles signals about a turn's tools: updates the branch, and decides again about its KV."""

from __future__ import annotations

from collections.abc import Sequence

from continuum.jobs.branches import Branches
from continuum.jobs.client_hints import ClientHint
from continuum.jobs.job import BranchTip
from continuum.jobs.registry import JobRegistry
from continuum.learning.gap_learner import GapLearner
from continuum.learning.tool_gaps import tool_name
from continuum.learning.tool_stats import ToolStats
from continuum.reports.turn_history import TurnHistory
from continuum.retention.retention import Retention
from continuum.retention.ttl import TtlDecision
from engine.records.messages import ToolCall, ToolGapStarted, ToolSignal, ToolState, TurnReceipt

ONE_QUESTION = TtlDecision(0.0, "a single question and its answer")
CANCELLED = TtlDecision(0.0, "the client cancelled the call")


class ToolSignals:
    """Each method returns the turn's receipt with the new decision; None if the turn is unknown or over."""

    def __init__(
        self,
        jobs: JobRegistry,
        branches: Branches,
        tools: ToolStats,
        gaps: GapLearner,
        retention: Retention,
        log: TurnHistory,
    ) -> None:
        self._jobs = jobs
        self._branches = branches
        self._tools = tools
        self._gaps = gaps
        self._retention = retention
        self._log = log

    def tools_started(self, signal: ToolGapStarted, now: float) -> TurnReceipt | None:
        """Called when the API server has parsed the turn: it is known which tools run."""
        tip = self._branches.ended_at(signal.request_id)
        if tip is None:
            return None
        self._learn_tools(tip, signal.calls, now)
        if tip.job.is_established:
            self._retention.redecide(tip, now)
        else:
            self._retention.release(tip, ONE_QUESTION)
        self._log.receipt_changed(tip)
        return tip.receipt

    def client_hinted(self, signal: ToolSignal, now: float) -> TurnReceipt | None:
        """Called when the client itself reported on its calls."""
        tip = self._meant_by(signal)
        if tip is None:
            return None
        if not tip.tools and signal.tool is not None:
            self._learn_tools(tip, [ToolCall(signal.tool)], now)
        tip.hint = tip.hint or ClientHint()
        tip.hint.take(signal, now - tip.ended_s, len(tip.tools or ()))
        self._branches.hinted(tip, signal, now)
        if tip.hint.state is ToolState.CANCELLED:
            self._retention.release(tip, CANCELLED)
        else:
            self._retention.redecide(tip, now, self._gaps.remaining(tip, now))
        self._log.receipt_changed(tip)
        return tip.receipt

    def _learn_tools(self, tip: BranchTip, calls: Sequence[ToolCall], now: float) -> None:
        tip.tools, tip.plain_tool = self._tools.keys(calls), tool_name(calls)
        self._branches.tools_known(tip, now)

    def _meant_by(self, signal: ToolSignal) -> BranchTip | None:
        """The tip of the turn that the signal names, or of the job's latest turn if it names none; None if no
        such turn waits to be continued."""
        job = self._jobs.get(signal.job_id)
        latest_first = reversed(job.tips) if job is not None else iter(())
        named = signal.request_id
        return next((each for each in latest_first if named in (None, each.external_id)), None)

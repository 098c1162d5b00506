"""Corrects the predicted duration of a turn's calls by a learned model, and collects calls for the next
lesson.

The unit is the gap: of parallel calls only the end of the last one is observed.
"""

from __future__ import annotations

from collections import deque
from functools import partial

import msgspec

from continuum.jobs.branches import BranchListener
from continuum.jobs.job import BranchTip
from continuum.learning.gap_estimate import GapEstimate
from continuum.learning.tool_stats import ToolStats
from engine.records.lessons import Lesson
from estimator.learned.call_history import CallFacts, CallHistory, PastCall, kind_of, log_of
from estimator.learned.corrector import Corrector

MAX_PAST_CALLS = 4096
"""Maximum number of ended calls kept for the next lesson; the oldest is dropped first."""
MIN_NEW_CALLS = 200
NEW_SHARE = 0.25
"""A lesson is due when the calls that ended since the last one exceed this share of the kept calls."""


class GapCorrections(BranchListener):
    """Queries the model once per gap, when it is known which tools run."""

    def __init__(self, tools: ToolStats, *, collects: bool) -> None:
        """``tools`` keeps the model and everything else that survives a restart. ``collects``: whether to
        collect calls for lessons."""
        self._tools = tools
        self._collects = collects
        self._corrector: Corrector | None = None
        self._past: deque[PastCall] = deque(maxlen=MAX_PAST_CALLS)
        self._num_new = 0

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        corrector = self._newest()
        so_far = tip.job.so_far
        if not tip.tools or so_far is None or not (self._collects or corrector):
            return
        job_id = tip.job.job_id
        tenant = tip.job.tenant
        key = self._tools.slowest(tip.tools, job_id, tenant)
        so_far.calls = so_far.calls or CallHistory()
        facts = CallFacts(tip.turn_number - 1, len(tip.tools), tip.num_prompt_tokens, tip.num_output_tokens)
        row = so_far.calls.row(self._tools.curve(tip.tools, job_id, tenant), key, facts)
        said = None if corrector is None or row is None else corrector.correct(kind_of(key), row)
        tip.estimate = GapEstimate(key, row, said)

    def ended(self, tip: BranchTip, gap_s: float) -> None:
        """Learns the duration of a gap whose calls have all ended."""
        estimate = tip.estimate
        so_far = tip.job.so_far
        if estimate is None or so_far is None or so_far.calls is None:
            return
        so_far.calls.add(estimate.key, gap_s)
        if estimate.row is None:
            return
        if self._corrector is not None and estimate.correction is not None:
            self._corrector.judge(estimate.correction, gap_s)
        if self._collects:
            kind = kind_of(estimate.key)
            self._past.append(PastCall(tip.job.job_id, kind, tuple(estimate.row), log_of(gap_s)))
            self._num_new += 1

    def _newest(self) -> Corrector | None:
        """Returns the corrector of the latest model. A new model starts with the credit from its training."""
        model = self._tools.duration_model
        known = self._corrector
        if model is None:
            return None
        if known is None or known.model is not model:
            self._corrector = Corrector(model)
        return self._corrector

    def take_lesson(self) -> Lesson | None:
        """Returns the past calls (msgpack, as ``estimator.learned.trainer`` reads them) if enough of them are
        new."""
        if self._num_new < max(MIN_NEW_CALLS, NEW_SHARE * len(self._past)):
            return None
        self._num_new = 0
        return partial(msgspec.msgpack.encode, list(self._past))

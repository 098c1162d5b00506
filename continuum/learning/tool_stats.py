"""What the policy has learned about tools and about what follows a turn; a file keeps it across restarts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from continuum.jobs.job import BranchTip
from continuum.tuning import Tuning
from engine.errors import ConfigError
from engine.records.messages import ToolCall
from estimator.durations import DurationEstimator
from estimator.growth import Growth
from estimator.learned.duration_model import DurationModel
from estimator.learned.work_model import WorkModel
from estimator.state import EstimatorStateError, load_learned, restore, snapshot, write_state
from estimator.survival import NOTHING_KNOWN, SurvivalCurve, max_of
from estimator.tenants import Learned, Tenants
from estimator.tool_key import ToolKey, tool_key

logger = logging.getLogger(__name__)

SAVE_EVERY_S = 60.0
"""Seconds between writes: a crash loses at most what was learned in this time."""


class ToolStats:
    """Durations of tool calls by kind of tool, tenant and job, and what follows a turn by what ended it."""

    def __init__(self, tuning: Tuning, path: str | None = None) -> None:
        """``path`` is the file that keeps the state across restarts, read now if it exists.
        ConfigError if it cannot be read."""
        self._path = path
        self._tuning = tuning
        self._learned = _nothing_learned(tuning)
        if path is not None:
            self._know(_load(path))
        self._unsaved_since_s: float | None = None
        self._writing: threading.Thread | None = None

    def keys(self, calls: Sequence[ToolCall]) -> list[ToolKey]:
        return [tool_key(call.name, call.arguments) for call in calls]

    # ---- how long tools take ----

    def curve(
        self, tools: Sequence[ToolKey] | None, job_id: str | None = None, tenant: str | None = None
    ) -> SurvivalCurve:
        """Time until the tenant's turn returns: the maximum over parallel calls.

        ``job_id`` adds the observations of that job. None for ``tools`` means not known yet: any tool. Empty
        ``tools``: nothing runs, and no curve is learned for the reply to an answer.
        """
        if tools is None:
            return self._learned.survival(tenant or "", ToolKey(()), None)
        if not tools:
            return NOTHING_KNOWN
        curves = [self._learned.survival(tenant or "", key, job_id) for key in tools]
        return curves[0] if len(curves) == 1 else max_of(curves)

    def corrected_curve(self, tip: BranchTip) -> SurvivalCurve:
        """Time from the turn's end until it returns, corrected by a learned model if one is trusted. It is
        only reported; no pin depends on it (docs/design/learning.md)."""
        known = self.curve(tip.tools, tip.job.job_id, tip.job.tenant)
        return known if tip.estimate is None else tip.estimate.of(known)

    def slowest(self, tools: Sequence[ToolKey], job_id: str | None, tenant: str | None) -> ToolKey:
        """The one of the parallel calls that is expected to end last."""
        if len(tools) == 1:
            return tools[0]
        learned = self._learned
        name = tenant or ""
        return max(tools, key=lambda k: learned.survival(name, k, job_id).median_remaining(0.0))

    def observe(
        self,
        tools: Sequence[ToolKey],
        duration_s: float,
        now: float,
        censored: bool = False,
        job_id: str | None = None,
        tenant: str | None = None,
    ) -> None:
        """Records a gap that ended or, if ``censored``, was given up. Of parallel calls it counts for the one
        expected to be slowest."""
        if not tools:
            return
        key = self.slowest(tools, job_id, tenant)
        self._learned.observe(tenant or "", key, duration_s, censored, job_id, now)
        self._save_now_and_then(now)

    def return_probability(self, tip: BranchTip, deadline_s: float, now: float) -> float:
        """P(the turn is back by the deadline | it is not back yet); a constant before any return was
        observed."""
        curve = self.curve(tip.tools, tip.job.job_id, tip.job.tenant)
        if not curve.support:
            return self._tuning.unseen_return
        gone = curve.cdf(max(0.0, now - tip.ended_s))
        if gone >= 1:
            return 0.0
        return (curve.cdf(max(0.0, deadline_s - tip.ended_s)) - gone) / (1 - gone)

    # ---- what follows a turn ----

    def observe_last_turn(self, tools: Sequence[ToolKey], tenant: str | None = None) -> None:
        """Records that no turn followed the one that ended with these calls (empty: with an answer)."""
        self._learned.observe_last(tenant or "", tools)

    def observe_next_turn(
        self, tools: Sequence[ToolKey], growth_tokens: int, tenant: str | None = None
    ) -> None:
        """Records that a turn followed, whose prompt is this much longer than the prompt and the answer
        before it."""
        self._learned.observe_next(tenant or "", tools, growth_tokens)

    def last_turn_probability(self, tools: Sequence[ToolKey] | None, tenant: str | None = None) -> float:
        """P(no turn follows one that ended with these calls); ``tools`` is None if the calls are not
        known."""
        return self._learned.turns_of(tenant or "").last_turn_probability(tools)

    def prompt_growth(self, tools: Sequence[ToolKey] | None, tenant: str | None = None) -> float | None:
        """Expected tokens that the next prompt adds to this prompt and its answer; None while nothing is
        learned."""
        return self._learned.turns_of(tenant or "").prompt_growth(tools)

    @property
    def growth(self) -> Growth:
        """How contexts of jobs grow."""
        return self._learned.growth

    # ---- learned models ----

    @property
    def work_model(self) -> WorkModel | None:
        """The learned model of jobs' remaining work, if there is one."""
        return self._learned.work_model

    @work_model.setter
    def work_model(self, model: WorkModel) -> None:
        self._learned.work_model = model

    @property
    def duration_model(self) -> DurationModel | None:
        """The learned correction of how long calls take, if there is one."""
        return self._learned.duration_model

    @duration_model.setter
    def duration_model(self, model: DurationModel) -> None:
        self._learned.duration_model = model

    # ---- the file ----

    def _save_now_and_then(self, now: float) -> None:
        """Writes on a thread, because the disk must not delay a step."""
        if self._path is None:
            return
        if self._unsaved_since_s is None:
            self._unsaved_since_s = now
        if now - self._unsaved_since_s >= SAVE_EVERY_S and not (self._writing and self._writing.is_alive()):
            self._unsaved_since_s = None
            self._writing = threading.Thread(target=_write, args=(snapshot(self._learned), self._path))
            self._writing.start()

    def state(self) -> str | None:
        """Returns what is learned as the file stores it; None if nothing is learned."""
        learned = self._learned
        models = (learned.work_model, learned.duration_model)
        counts = (learned.durations.items(), learned.turns.tallies, learned.growth.kinds)
        if not any(counts) and not any(models):
            return None
        return snapshot(learned).decode()

    def recall(self, state: str) -> None:
        """Restores a state returned by ``state``; EstimatorStateError if it is not such a state."""
        self._know(restore(state.encode()))

    def _know(self, learned: Tenants) -> None:
        """Replaces what is learned, but keeps this object's tuning parameters."""
        self._learned = learned
        for each in (learned.of_all, *learned.own.values()):
            _tune(each, self._tuning)

    def wait_until_written(self) -> None:
        if self._writing is not None:
            self._writing.join()

    def save(self) -> None:
        """Writes what was learned; the last call."""
        self.wait_until_written()
        if self._path is not None:
            _write(snapshot(self._learned), self._path)


def _nothing_learned(tuning: Tuning) -> Tenants:
    learned = Learned(DurationEstimator(num_bins=tuning.num_bins))
    _tune(learned, tuning)
    return Tenants(learned)


def _tune(learned: Learned, tuning: Tuning) -> None:
    learned.durations.set_params(
        prior_strength=tuning.prior_strength,
        half_life=tuning.half_life,
        half_life_s=tuning.half_life_s,
        min_judged=tuning.min_judged,
    )
    learned.turns.prior_strength = tuning.prior_strength
    learned.turns.half_life = tuning.half_life
    learned.turns.last_after_call = tuning.last_after_call
    learned.turns.last_after_answer = tuning.last_after_answer


def _load(path: str) -> Tenants:
    try:
        learned = load_learned(path)
        # A path that cannot be written to is reported now, not when the server stops.
        write_state(snapshot(learned), path)
    except EstimatorStateError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"The estimator state {path} cannot be written: {error.strerror}.") from error
    return learned


def _write(state: bytes, path: str) -> None:
    try:
        write_state(state, path)
    except OSError as error:
        logger.warning("Cannot write the estimator state %s: %s.", path, error.strerror)

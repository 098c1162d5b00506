"""Predicts how much work a job still has by a learned model, and collects ended jobs for training the next
model.

A model is used only while it orders jobs better than their age does, scored on the jobs that ended since it
was trained (A. P. Dawid's prequential principle, J. R. Stat. Soc. A 147, 1984).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import partial
from typing import NamedTuple

import msgspec

from continuum.jobs.branches import BranchListener
from continuum.jobs.job import BranchTip, Job, Turn
from continuum.learning.job_so_far import Forecast, JobSoFar
from continuum.learning.tool_stats import ToolStats
from engine.records.lessons import Lesson
from estimator.learned.concordance import Concordance
from estimator.learned.job_history import PastJob, TurnFacts
from estimator.learned.work_model import WorkModel
from estimator.plain_math import exp

MAX_PAST_JOBS = 256
"""Maximum number of ended jobs kept for the next lesson; the oldest is dropped first."""
MIN_NEW_JOBS = 8
NEW_SHARE = 0.25
"""A lesson is due when the jobs that ended since the last one exceed this share of the kept jobs."""
JUDGING_JOBS = 32
"""An ended job is compared with this many that ended before it."""
CREDIT_JOBS = 16.0
"""The model's score from its training counts as much as this many ended jobs."""
CHANCE = 0.5
KEEP = 0.98
"""The weight of a scored job is multiplied by this after each further one: half after 34."""


class Judged(NamedTuple):
    """A scored forecast of a job that has ended."""

    predicted: float
    num_turns: int
    remaining: float


class RemainingWork(BranchListener):
    """Predicts the remaining work of jobs and collects lessons."""

    def __init__(self, tools: ToolStats) -> None:
        """``tools`` keeps the model and everything else that survives a restart."""
        self._tools = tools
        self._model: WorkModel | None = None
        self._credit = Concordance()
        self._ended: deque[list[Judged]] = deque(maxlen=JUDGING_JOBS)
        self._past: OrderedDict[str, PastJob] = OrderedDict()
        self._num_new = 0
        self._served_s = self._served_work = 0.0
        self.num_models = 0
        """Number of models that were installed while the server ran."""

    # ---- what is predicted ----

    def excess_s(self, turn: Turn) -> float | None:
        """Seconds of service that the turn's job needs beyond usual jobs, this turn included. None if no
        model is trusted, or if the request may be a single-turn request."""
        model = self._newest_model()
        so_far = turn.job.so_far
        if model is None or so_far is None:
            return None
        if so_far.model is not model or so_far.request_id != turn.request.request_id:
            self._predict(so_far, turn, model)
        if not turn.job.is_established or not self._is_believed:
            return None
        return so_far.excess * self._served_s / self._served_work if self._served_work else 0.0

    @property
    def _is_believed(self) -> bool:
        """Whether the model orders jobs better than chance and than their age."""
        return self._credit.right > max(CHANCE, self._credit.right_by_age)

    def learned(self, model: WorkModel) -> None:
        """Installs a new model."""
        self._tools.work_model = model
        self.num_models += 1

    def _newest_model(self) -> WorkModel | None:
        """Returns the latest model. A new model starts with the score from its training."""
        model = self._tools.work_model
        if model is not None and model is not self._model:
            self._credit = Concordance(CREDIT_JOBS, model.right, model.right_by_age)
            self._ended.clear()
        self._model = model
        return model

    @staticmethod
    def _predict(so_far: JobSoFar, turn: Turn, model: WorkModel) -> None:
        so_far.model = model
        so_far.request_id = turn.request.request_id
        prompt = turn.request.num_prompt_tokens
        history = so_far.history
        row = history.row(prompt, _num_new_tokens(turn), turn.gap_s or 0.0, model.tools)
        predicted = model.trees.predict(row)
        so_far.excess = exp(predicted) - exp(model.usual)
        num_turns = len(history.turns)
        if num_turns & (num_turns + 1) == 0:
            so_far.forecasts.append(Forecast(model, predicted, num_turns, history.work))

    # ---- what happened ----

    def job_here(self, job: Job) -> None:
        """Prepares a job for predictions when one of its turns arrives."""
        if job.so_far is None:
            job.so_far = JobSoFar()

    def turn_ended(self, turn: Turn, now: float) -> None:
        """Records a turn that ended normally."""
        so_far = turn.job.so_far
        request = turn.request
        if so_far is None:
            return
        facts = TurnFacts(
            request.num_prompt_tokens, _num_new_tokens(turn), request.num_output_tokens, turn.gap_s or 0.0
        )
        so_far.history.add(facts)
        if request.first_scheduled_time is not None:
            self._served_s += now - request.first_scheduled_time
            self._served_work += facts.work

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        if tip.tools:
            so_far = tip.job.so_far
            if so_far is not None:
                so_far.history.called([key.parts[0] for key in tip.tools if key.parts])
        else:
            self._job_ended(tip.job)  # if it goes on after this answer, it has ended once more then

    def on_job_done(self, job: Job, now: float) -> None:
        self._job_ended(job)

    def on_job_gone(self, job: Job, now: float) -> None:
        if job.is_finished:
            self._job_ended(job)

    def _job_ended(self, job: Job) -> None:
        so_far = job.so_far
        if so_far is None or not so_far.history.turns:
            return
        self._judge(so_far)
        self._num_new += job.job_id not in self._past
        history = so_far.history
        self._past[job.job_id] = PastJob(job.job_id, tuple(history.turns), history.later_work)
        self._past.move_to_end(job.job_id)
        if len(self._past) > MAX_PAST_JOBS:
            self._past.popitem(last=False)

    def _judge(self, so_far: JobSoFar) -> None:
        """Scores the predictions for this job against those for jobs that ended before it."""
        work = so_far.history.work
        judged = [
            Judged(said.predicted, said.num_turns, work - said.work_before)
            for said in so_far.forecasts
            if said.model is self._model
        ]
        so_far.forecasts.clear()
        if not judged:
            return
        pairs = [
            (one, others[index % len(others)]) for others in self._ended for index, one in enumerate(judged)
        ]
        if pairs:
            self._credit.fade(KEEP)
        for one, other in pairs:
            self._credit.add(
                one.predicted - other.predicted,
                other.num_turns - one.num_turns,
                one.remaining - other.remaining,
                weight=1 / len(pairs),
            )
        self._ended.append(judged)

    # ---- lessons ----

    def take_lesson(self) -> Lesson | None:
        """Returns the past jobs (msgpack, as ``estimator.learned.trainer`` reads them) if enough of them are
        new."""
        if self._num_new < max(MIN_NEW_JOBS, NEW_SHARE * len(self._past)):
            return None
        self._num_new = 0
        return partial(msgspec.msgpack.encode, list(self._past.values()))


def _num_new_tokens(turn: Turn) -> int:
    return max(0, turn.request.num_prompt_tokens - turn.num_known_tokens)

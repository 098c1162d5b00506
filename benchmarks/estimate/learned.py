"""The estimator with a learned correction on top, like a server's after training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from benchmarks.estimate.folds import grouped_folds
from benchmarks.estimate.predictors import EstimatorQuantiles, FloatArray, play, study
from estimator.learned.call_history import CallFacts, CallHistory, PastCall, kind_of, log_of
from estimator.learned.corrector import Correction, Corrector
from estimator.learned.duration_model import DurationModel
from estimator.learned.duration_trainer import fit_durations
from estimator.survival import SurvivalCurve
from eval.learn.calls import Call, Played

NUM_FOLDS = 4
"""Number of folds in which learned jobs are predicted, to train the correction."""


class LearnedQuantiles(EstimatorQuantiles):
    """Corrects the estimator where its model is trusted; without a model it collects training rows."""

    def __init__(self, model: DurationModel | None = None) -> None:
        super().__init__()
        self._corrector = None if model is None else Corrector(model)
        self._histories: dict[str, CallHistory] = {}
        """Calls of the predicted jobs so far."""
        self._open: dict[int, tuple[list[float], Correction | None]] = {}
        self.rows: list[tuple[Call, list[float]]] = []
        """Calls that were predicted and have ended, with their features."""

    def predict(self, call: Call, job_id: str) -> FloatArray | None:
        return self._quantiles(self.curve(call, job_id))

    def curve(self, call: Call, job_id: str) -> SurvivalCurve:
        """Returns the curve of a call that begins."""
        curve = self._curve(call, job_id)
        history = self._histories.setdefault(job_id, CallHistory())
        facts = CallFacts(call.turn_index, call.num_parallel, call.input_tokens, call.output_tokens)
        row = history.row(curve, call.key, facts)
        if row is None:
            return curve
        correction = None if self._corrector is None else self._corrector.correct(kind_of(call.key), row)
        self._open[id(call)] = row, correction
        return curve if correction is None else correction.of(curve)

    def learn(self, call: Call, job_id: str, censored: bool = False) -> None:
        super().learn(call, job_id, censored)
        history = self._histories.get(job_id)
        if history is None or censored:
            return
        history.add(call.key, call.seconds)
        row, correction = self._open.pop(id(call), (None, None))
        if row is not None:
            self.rows.append((call, row))
        if self._corrector is not None and correction is not None:
            self._corrector.judge(correction, call.seconds)

    def fork(self) -> Self:
        copy = super().fork()
        copy._corrector = None if self._corrector is None else Corrector(self._corrector.model)
        return copy


def past_calls(jobs: Sequence[Played], seed: int) -> list[PastCall]:
    """Returns each call with the prediction of an estimator that had not seen its group; none if there are
    fewer than two groups."""
    past: list[PastCall] = []
    if len({job.group for job in jobs}) < 2:
        return past
    for fold in grouped_folds(jobs, NUM_FOLDS, seed):
        estimator = LearnedQuantiles()
        study(estimator, fold.learned)
        for job in fold.held_out:
            played = estimator.fork()
            play(played, job)
            past += [
                PastCall(job.group, kind_of(call.key), tuple(row), log_of(call.seconds))
                for call, row in played.rows
            ]
    return past


def taught(jobs: Sequence[Played], seed: int) -> LearnedQuantiles:
    """Returns an estimator trained on these jobs, including the correction."""
    estimator = LearnedQuantiles(fit_durations(past_calls(jobs, seed)))
    study(estimator, jobs)
    return estimator

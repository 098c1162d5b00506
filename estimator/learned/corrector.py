"""Corrects predictions of calls by a learned model, as long as it improves them.

The model is scored for each tool separately, on the calls that ended since it was installed (A. P. Dawid's
prequential principle, J. R. Stat. Soc. A 147, 1984).
"""

from __future__ import annotations

from collections.abc import Sequence

from estimator.learned.call_history import LEVELS, MEDIAN, log_of
from estimator.learned.duration_model import MAX_KINDS, DurationModel, corrected
from estimator.plain_math import exp
from estimator.survival import SurvivalCurve

CREDIT_CALLS = 20.0
"""The model's score from its training counts as much as this many ended calls."""
KEEP = 0.99
"""The weight of a scored call is multiplied by this after each further one: half after 69."""


class Correction:
    """A model's correction of one call."""

    __slots__ = ("_after", "_before", "is_believed", "kind", "logs", "row")

    def __init__(self, kind: str, row: list[float], logs: list[float], is_believed: bool) -> None:
        self.kind = kind
        self.row = row
        self.logs = logs
        """The values that are added to the logarithms of the quantiles at ``LEVELS``."""
        self.is_believed = is_believed
        self._before: SurvivalCurve | None = None
        self._after: SurvivalCurve | None = None

    def of(self, curve: SurvivalCurve) -> SurvivalCurve:
        """The corrected curve; the same curve if the model is not trusted."""
        if not self.is_believed:
            return curve
        if self._after is None or self._before is not curve:
            self._before, self._after = curve, corrected(curve, self.logs)
        return self._after

    @property
    def factor(self) -> float:
        """The factor by which the median is multiplied."""
        return exp(self.logs[MEDIAN])


class Corrector:
    """A model, with its losses per tool compared with those without it."""

    def __init__(self, model: DurationModel) -> None:
        self.model = model
        self._excess = {each.kind: CREDIT_CALLS * (each.loss - each.loss_without) for each in model.kinds}
        """Sum over calls of the loss with the model minus the loss without it, by tool."""
        self._usual = CREDIT_CALLS * (model.loss - model.loss_without)

    def correct(self, kind: str, row: list[float]) -> Correction:
        """Returns the correction of a call that begins."""
        return Correction(kind, row, self.model.corrections(row), self._excess.get(kind, self._usual) < 0)

    def judge(self, correction: Correction, seconds: float) -> None:
        """Scores the correction of a call that has ended."""
        log_s = log_of(seconds)
        before = correction.row
        after = [log + added for log, added in zip(before, correction.logs, strict=False)]
        excess = pinball(log_s, after) - pinball(log_s, before)
        kind = correction.kind
        known = self._excess.get(correction.kind, self._usual)
        if kind in self._excess or len(self._excess) < MAX_KINDS:
            self._excess[kind] = KEEP * known + excess


def pinball(log_s: float, quantiles: Sequence[float]) -> float:
    """Mean loss of the quantiles at ``LEVELS``; the true quantiles minimize it (R. Koenker, G. Bassett,
    Econometrica 46, 1978)."""
    total = 0.0
    for level, quantile in zip(LEVELS, quantiles, strict=False):
        above = log_s - quantile
        total += level * above if above > 0 else (level - 1.0) * above
    return total / len(LEVELS)

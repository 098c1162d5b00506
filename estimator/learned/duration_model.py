"""A learned correction of how long calls take, with its scores from training."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from estimator.learned.call_history import FEATURES, FLOOR_S, LEVELS
from estimator.learned.trees import ModelError, Trees
from estimator.plain_math import exp
from estimator.survival import SurvivalCurve

MODEL_VERSION = 1
PREDICTS = "durations of calls"
MAX_CORRECTION = 3.0
"""Largest absolute correction of a logarithm: a factor of 20."""
MAX_KINDS = 256
Loss = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class KindLoss(msgspec.Struct, array_like=True, frozen=True):
    """How well held-out calls of one tool were predicted."""

    kind: str
    loss: Loss
    """Mean pinball loss of the logarithm over ``LEVELS``."""
    loss_without: Loss
    """The same loss without the correction."""


class DurationModel(msgspec.Struct, frozen=True, kw_only=True):
    """Corrects the logarithms of the estimator's quantiles."""

    trees: Annotated[list[Trees], msgspec.Meta(min_length=len(LEVELS), max_length=len(LEVELS))]
    """One model per quantile of ``LEVELS``, which predicts what to add to its logarithm."""
    num_calls: Annotated[int, msgspec.Meta(ge=0)]
    loss: Loss
    """Loss over all calls; see ``KindLoss``."""
    loss_without: Loss
    kinds: Annotated[list[KindLoss], msgspec.Meta(max_length=MAX_KINDS)]
    """Losses by tool, for tools with enough calls."""
    predicts: Literal["durations of calls"] = "durations of calls"
    version: int = MODEL_VERSION

    def corrections(self, row: list[float]) -> list[float]:
        """The values to add to the logarithms of the quantiles, adjusted so that the quantiles keep their
        order."""
        least = -1e300
        corrections = []
        for before, trees in zip(row, self.trees, strict=False):
            correction = min(max(trees.predict(row), -MAX_CORRECTION), MAX_CORRECTION)
            least = max(least, before + correction)
            corrections.append(least - before)
        return corrections


def corrected(curve: SurvivalCurve, corrections: list[float]) -> SurvivalCurve:
    """The curve with its quantiles at ``LEVELS`` corrected."""
    return curve.moved(LEVELS, [exp(each) for each in corrections], FLOOR_S)


def check_durations(model: DurationModel) -> None:
    """Raises ModelError if the model cannot be evaluated."""
    if model.version != MODEL_VERSION:
        raise ModelError(
            f"its model of calls' durations has version {model.version}, this program reads {MODEL_VERSION}"
        )
    faults = (trees.fault(len(FEATURES)) for trees in model.trees)
    fault = next(filter(None, faults), None)
    if fault is not None:
        raise ModelError(f"its model of calls' durations is damaged: {fault}")

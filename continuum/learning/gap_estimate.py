"""The prediction for one gap, made when it became known which tools run."""

from __future__ import annotations

from dataclasses import dataclass

from estimator.learned.corrector import Correction
from estimator.survival import SurvivalCurve
from estimator.tool_key import ToolKey


@dataclass(slots=True)
class GapEstimate:
    """The features of a gap, and a model's correction of the estimator."""

    key: ToolKey
    """The call that was expected to be the slowest."""
    row: list[float] | None
    """The features; None if the estimator knew nothing."""
    correction: Correction | None
    """None without a model."""

    def of(self, curve: SurvivalCurve) -> SurvivalCurve:
        """Returns the corrected curve; the same curve if nothing is corrected."""
        return curve if self.correction is None else self.correction.of(curve)

    @property
    def factor(self) -> float | None:
        """The factor by which the median is multiplied; None if nothing is corrected."""
        correction = self.correction
        return None if correction is None or not correction.is_believed else correction.factor

"""What was said of one gap when it became known which tools run."""

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
    """None where the estimator knew nothing."""
    correction: Correction | None
    """None without a model."""

    def of(self, curve: SurvivalCurve) -> SurvivalCurve:
        """What is believed now; the same curve where nothing is corrected."""
        return curve if self.correction is None else self.correction.of(curve)

    @property
    def factor(self) -> float | None:
        """By which the median is multiplied; None where nothing is corrected."""
        correction = self.correction
        return None if correction is None or not correction.is_believed else correction.factor

"""How often a predicted order of jobs was right, compared with order by age (Kendall's concordance)."""

from __future__ import annotations


class Concordance:
    """Counts pairs of jobs with known remaining work, and how often each order was correct."""

    __slots__ = ("num_pairs", "num_right", "num_right_by_age")

    def __init__(self, num_pairs: float = 0.0, right: float = 0.5, right_by_age: float = 0.5) -> None:
        self.num_pairs = num_pairs
        self.num_right = num_pairs * right
        self.num_right_by_age = num_pairs * right_by_age

    def add(self, predicted: float, by_age: float, actual: float, weight: float = 1.0) -> None:
        """Adds a pair by its differences: predicted, by the rank of age, and actual. A tie is half right."""
        if actual == 0:
            return
        self.num_pairs += weight
        self.num_right += weight * _agreement(predicted, actual)
        self.num_right_by_age += weight * _agreement(by_age, actual)

    def fade(self, keep: float) -> None:
        """Multiplies the weight of earlier pairs by ``keep``."""
        self.num_pairs *= keep
        self.num_right *= keep
        self.num_right_by_age *= keep

    @property
    def right(self) -> float:
        """Share of pairs ordered correctly; a half if there are none."""
        return self.num_right / self.num_pairs if self.num_pairs else 0.5

    @property
    def right_by_age(self) -> float:
        return self.num_right_by_age / self.num_pairs if self.num_pairs else 0.5


def _agreement(predicted: float, actual: float) -> float:
    if predicted == 0:
        return 0.5
    return 1.0 if (predicted > 0) == (actual > 0) else 0.0

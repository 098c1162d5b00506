"""Goals for the GPU path: a share of a floor, or a value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound of a figure's median, or of its share of its floor."""

    bound: float
    of_share: bool = False
    at_most: bool = False

    def told(self, unit: str) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{sign} {self.bound:.0%} of the floor" if self.of_share else f"{sign} {self.bound:,g} {unit}"

    def met_by(self, median: float, share: float | None) -> bool | None:
        """Returns None if there is no share to compare."""
        value = share if self.of_share else median
        if value is None:
            return None
        return value <= self.bound if self.at_most else value >= self.bound


def share(bound: float) -> Goal:
    """Makes a goal: the floor is at least this share of the measured time."""
    return Goal(bound, of_share=True)


DECODE = {1: share(0.80), 32: share(0.85), 128: share(0.88)}
"""Goals by number of sequences, of 4,096 tokens each."""
PREFILL_8K = share(0.78)
PREFILL_2K_ON_32K = share(0.75)
IDLE = Goal(3.0, at_most=True)
THROUGHPUT = Goal(20_000)
AGAINST_TRANSFORMERS = Goal(10)
RELOAD = Goal(8)

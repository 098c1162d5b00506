"""Learns how well the past calls of one job or tenant predict its next call. It does not know keys.

In some work the same tests take as long as last time; in other work every call is a new draw. So every call
that a job repeats is predicted with several weights of the belief about all jobs, and the weight that
predicted best is used: prequential choice (A. P. Dawid, J. R. Stat. Soc. A 147, 1984) of Bühlmann's
credibility constant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from estimator.plain_math import dot

STRENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 1e6)
"""The belief about all jobs weighs as much as this many observations of the job. With the last value, the
job's own calls have almost no weight."""
MIN_JUDGED = 20.0
"""A strength is chosen after this many scored predictions; until then, that of a more general kind of call is
used."""


class Credibility:
    """How well each strength predicted calls of one kind; older scores fade."""

    __slots__ = ("losses", "num_judged", "strengths")

    def __init__(self, strengths: Sequence[float] = STRENGTHS) -> None:
        self.strengths = strengths
        self.losses = [0.0] * len(strengths)
        """Sums over the scored predictions, one per strength."""
        self.num_judged = 0.0

    def add(self, losses: Sequence[float], keep: float) -> None:
        """Adds the losses of one prediction; all earlier ones count ``keep`` times as much as before."""
        self.losses = [old * keep + new for old, new in zip(self.losses, losses, strict=True)]
        self.num_judged = self.num_judged * keep + 1.0

    def strength(self, min_judged: float) -> float | None:
        """The strength with the smallest loss; None while too few predictions have been scored."""
        if self.num_judged < min_judged:
            return None
        return self.strengths[self.losses.index(min(self.losses))]


def losses_of(
    of_job: Sequence[float],
    of_all: Sequence[float],
    weight: float,
    index: int,
    strengths: Sequence[float] = STRENGTHS,
) -> list[float]:
    """The distance of each strength's distribution from a call that ended in bin ``index``: [num_strengths].

    ``of_job``: weights of the job's calls per bin; ``of_all``: the belief about all jobs, which is based on
    ``weight`` observations and can lend at most that many. The distance is the continuous ranked probability
    score over the bins (J. E. Matheson, R. L. Winkler, Management Science 22, 1976): the sum of (P(D <= edge)
    - [it had ended])².
    """
    num_calls = math.fsum(of_job)
    own = [so_far - (num_calls if place >= index else 0) for place, so_far in enumerate(accumulate(of_job))]
    usual = [so_far - (place >= index) for place, so_far in enumerate(accumulate(of_all))]
    # Of (own + b·usual) / (calls + b), squared and summed, only b differs between the strengths.
    squared = dot(own, own)
    crossed = dot(own, usual)
    usual_squared = dot(usual, usual)
    losses = []
    for strength in strengths:
        borrowed = min(strength, weight)
        total = num_calls + borrowed
        losses.append(
            (squared + 2 * borrowed * crossed + borrowed * borrowed * usual_squared) / (total * total)
        )
    return losses

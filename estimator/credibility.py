"""Learns how much a job's own calls tell of its next one. Knows nothing of keys or jobs.

In some work the same tests take as long as last time, in some every call is a new draw. So several strengths
of the belief about all jobs are tried on every call that a job repeats, and the one that foretold best is
used: prequential choice (A. P. Dawid, J. R. Stat. Soc. A 147, 1984) of Bühlmann's credibility constant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

STRENGTHS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 1e6])
"""So many observations of the job weigh as much as the belief about all jobs; the last: the job says
nothing."""
MIN_JUDGED = 20.0
"""So many judgements make a choice; with fewer it is left to a more general kind of call."""


class JobCredibility:
    """Of one kind of call: how well each strength foretold, old judgements fading."""

    __slots__ = ("losses", "num_judged")

    def __init__(self) -> None:
        self.losses: FloatArray = np.zeros(len(STRENGTHS))
        """Sum over judgements."""
        self.num_judged = 0.0

    def add(self, losses: FloatArray, keep: float) -> None:
        """One judgement more; all earlier ones count ``keep`` times as much as before."""
        self.losses = self.losses * keep + losses
        self.num_judged = self.num_judged * keep + 1.0

    def strength(self, min_judged: float) -> float | None:
        """The best one; None while too little was judged."""
        if self.num_judged < min_judged:
            return None
        return float(STRENGTHS[self.losses.argmin()])


def losses_of(of_job: FloatArray, of_all: FloatArray, weight: float, index: int) -> FloatArray:
    """How far each strength's distribution was from a call that ended in bin ``index``: [num_strengths].

    ``of_job``: weights of the job's calls per bin; ``of_all``: the belief about all jobs, which rests on
    ``weight`` observations and lends no more. Continuous ranked probability score over the bins (J. E.
    Matheson, R. L. Winkler, Management Science 22, 1976).
    """
    borrowed = np.minimum(STRENGTHS, weight)[:, None]
    own = of_job.cumsum()
    ended_by = (own + borrowed * of_all.cumsum()) / (own[-1] + borrowed)
    ended_by[:, index:] -= 1.0
    losses: FloatArray = np.einsum("ij,ij->i", ended_by, ended_by)
    return losses

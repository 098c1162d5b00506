"""Learns how much to trust clients that state how long a tool call will still take. Does not know jobs or
signals.

A stated remaining time becomes a distribution by the ratios of actual to stated time, of this client and tool
if known. It is mixed with the distribution learned from past calls, with weights from the past errors of
each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from estimator.plain_math import exp, geometric, halved, log
from estimator.survival import SurvivalCurve

SHORTEST_S = 0.05
"""Shorter times are not distinguished: no client predicts the end of a call to the millisecond."""
MAX_RATIO = 64.0
BINS_PER_OCTAVE = 4
PRIOR_SPREAD = 0.35
"""Standard deviation of ln(ratio) before anything is learned: two of three are within a factor of
1.4."""
PRIOR_LOSS_SAID = 0.5
PRIOR_LOSS_KNOWN = 2.0
"""Expected errors of the stated and the learned time, in ln(seconds), before anything is learned: the client,
which runs the tool, knows more."""
STRENGTH = 4.0
"""A source with this many observations is as credible as its parent, as for durations."""
HALF_LIFE = 100.0
MAX_SOURCES = 1024

Source = tuple[str, ...]
"""Who states the time, and for what, from the general to the specific: a client, a tool."""

_NUM_BINS = 2 * round(log(MAX_RATIO) / log(2)) * BINS_PER_OCTAVE
_EDGES = geometric(1 / MAX_RATIO, MAX_RATIO, _NUM_BINS + 1)
_KEEP = halved(1 / HALF_LIFE)


@dataclass(frozen=True, slots=True)
class Expectation:
    """A stated remaining time: at ``said_s`` after the start of the call, it is expected to take this much
    longer."""

    said_s: float
    remaining_s: float


def _prior_masses() -> list[float]:
    """A normal distribution of ln(ratio), truncated at three standard deviations: [num_bins]."""
    deviations = [(log(low) + log(high)) / 2 / PRIOR_SPREAD for low, high in pairwise(_EDGES)]
    density = [exp(-0.5 * each * each) if abs(each) <= 3 else 0.0 for each in deviations]
    total = math.fsum(density)
    return [each / total for each in density]


_PRIOR_MASSES = _prior_masses()


@dataclass(slots=True)
class _Credit:
    """The observations of one source."""

    ratios: list[float] = field(default_factory=lambda: [0.0] * _NUM_BINS)
    """Decayed counts of the ratios of actual to stated remaining time."""
    num_judged: float = 0.0
    num_compared: float = 0.0
    loss_said: float = 0.0
    loss_known: float = 0.0
    """Sums of |ln(actual / predicted)| over the calls for which both predictions exist."""


class ExpectationMemory:
    """How much stated times can be trusted, by source."""

    def __init__(self) -> None:
        self._credits: OrderedDict[Source, _Credit] = OrderedDict()
        """Credits by source, the least recently seen first, a parent always after its children."""

    def remaining(self, source: Source, remaining_s: float, known: SurvivalCurve | None) -> SurvivalCurve:
        """Distribution of the remaining time, from the moment at which ``remaining_s`` was stated. ``known``
        is the one learned from past calls; None if there is none."""
        masses, num_judged = self._ratios(source)
        edges_s = [0.0, *(max(remaining_s, SHORTEST_S) * edge for edge in _EDGES)]
        ended_by = [min(mass, 1.0) for mass in accumulate(masses, initial=0.0)]
        said = SurvivalCurve(edges_s, [0.0, *ended_by], num_judged + 1)
        if known is None or not known.num_observations:
            return said
        return _mixture(said, known, self.weight(source))

    def weight(self, source: Source) -> float:
        """Weight of the stated time against the learned one, in [0, 1]."""
        said = PRIOR_LOSS_SAID
        known = PRIOR_LOSS_KNOWN
        for depth in range(len(source) + 1):
            credit = self._credits.get(source[:depth])
            if credit is not None:
                total = credit.num_compared + STRENGTH
                said = (credit.loss_said + STRENGTH * said) / total
                known = (credit.loss_known + STRENGTH * known) / total
        return known / (said + known)

    def observe(
        self, source: Source, said_remaining_s: float, actual_remaining_s: float, known_s: float | None
    ) -> None:
        """Learns from a call that has ended. ``known_s`` is the prediction from past calls alone; None if
        there was none."""
        ratio = max(actual_remaining_s, SHORTEST_S) / max(said_remaining_s, SHORTEST_S)
        index = min(max(bisect_left(_EDGES, ratio) - 1, 0), _NUM_BINS - 1)
        predicted_s = self._median(source) * max(said_remaining_s, SHORTEST_S)
        for depth in range(len(source), -1, -1):
            credit = self._credits.setdefault(source[:depth], _Credit())
            self._credits.move_to_end(source[:depth])
            _learn(credit, index, actual_remaining_s, predicted_s, known_s)
        while len(self._credits) > MAX_SOURCES:
            self._credits.popitem(last=False)

    def _ratios(self, source: Source) -> tuple[list[float], float]:
        """Probability of each ratio, borrowing from the source's parents while little is known;
        [num_bins]."""
        masses = _PRIOR_MASSES
        num_judged = 0.0
        for depth in range(len(source) + 1):
            credit = self._credits.get(source[:depth])
            if credit is not None:
                num_judged = credit.num_judged
                total = num_judged + STRENGTH
                both = zip(credit.ratios, masses, strict=True)
                masses = [(own + STRENGTH * usual) / total for own, usual in both]
        return masses, num_judged

    def _median(self, source: Source) -> float:
        masses, _ = self._ratios(source)
        return _EDGES[bisect_left([*accumulate(masses)], 0.5) + 1]


def _learn(credit: _Credit, index: int, actual_s: float, predicted_s: float, known_s: float | None) -> None:
    credit.ratios = [count * _KEEP for count in credit.ratios]
    credit.ratios[index] += 1.0
    credit.num_judged = credit.num_judged * _KEEP + 1.0
    if known_s is None:
        return
    credit.num_compared = credit.num_compared * _KEEP + 1.0
    credit.loss_said = credit.loss_said * _KEEP + _loss(actual_s, predicted_s)
    credit.loss_known = credit.loss_known * _KEEP + _loss(actual_s, known_s)


def _loss(actual_s: float, predicted_s: float) -> float:
    if math.isinf(predicted_s):
        return log(MAX_RATIO)
    ratio = max(actual_s, SHORTEST_S) / max(predicted_s, SHORTEST_S)
    return min(abs(log(ratio)), log(MAX_RATIO))


def _mixture(first: SurvivalCurve, second: SurvivalCurve, weight: float) -> SurvivalCurve:
    """The distribution that is ``first`` with probability ``weight``, else ``second``."""
    edges_s = sorted({*first.edges_s, *second.edges_s})
    probabilities = [weight * first.cdf(edge) + (1 - weight) * second.cdf(edge) for edge in edges_s]
    return SurvivalCurve(edges_s, probabilities, max(first.num_observations, second.num_observations))

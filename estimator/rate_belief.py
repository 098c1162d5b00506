"""Learns how much groups differ in the rate at which something ends, and mixes each group's rate with the
overall one. It does not know jobs.

This is Bühlmann's credibility (ASTIN Bulletin 4, 1967) of a rate: a group's own rate is mixed with the
overall one, by a strength. Several strengths, and no difference at all, are weighted by the likelihood of the
observations: if groups are alike, or little was observed, each group gets the overall rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from estimator.plain_math import exp, lgamma, log, log1p

STRENGTHS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Strengths that are tried: the number of ends that make a group's own rate as credible as the
overall one."""
MOST_EVIDENCE = 50.0
"""Upper bound of a log-likelihood: larger ones would make no difference."""
NOTHING = 1e-9
"""An exposure below this counts as zero."""


@dataclass(slots=True)
class RateGroup:
    """The observations of one group."""

    exposure: float = 0.0
    """Total exposure in which an end could occur, for example in seconds."""
    num_ends: float = 0.0
    ended: float = 0.0
    """Exposure until the end, summed over the members that ended."""
    ended_squared: float = 0.0

    def fade(self) -> None:
        """Halves the weight of all observations so far."""
        self.exposure /= 2
        self.num_ends /= 2
        self.ended /= 2
        self.ended_squared /= 2


def exposures_per_end(groups: Sequence[RateGroup]) -> list[float] | None:
    """Expected exposure until an end, for each group in order; None before any member ended."""
    num_ends = math.fsum(group.num_ends for group in groups)
    exposure = math.fsum(group.exposure for group in groups)
    if num_ends <= 0 or exposure < NOTHING:
        return None
    usual = exposure / num_ends
    beliefs = _beliefs(groups, usual, dispersion_of(groups))
    return [
        usual
        + math.fsum(
            probability * ((group.exposure + strength * usual) / (group.num_ends + strength) - usual)
            for strength, probability in beliefs
        )
        for group in groups
    ]


def dispersion_of(groups: Sequence[RateGroup]) -> float:
    """Overdispersion of the counts within a group relative to a Poisson process; at least 1. It is the
    squared coefficient of variation of single exposures, which is 1 for a Poisson process."""
    squares = freedom = 0.0
    for group in groups:
        if group.num_ends > 1 and group.ended > NOTHING:
            share = group.num_ends / group.ended
            squares += max(0.0, group.ended_squared * share * share - group.num_ends)
            freedom += group.num_ends - 1
    return max(1.0, squares / freedom) if freedom else 1.0


def _beliefs(groups: Sequence[RateGroup], usual: float, dispersion: float) -> list[tuple[float, float]]:
    """Returns the strengths with their probabilities; the remainder to 1 is the probability of no
    difference."""
    if len(groups) < 2:
        return []
    counts = [(group.num_ends / dispersion, group.exposure / usual / dispersion) for group in groups]
    likelihoods = [exp(min(MOST_EVIDENCE, _evidence(counts, strength))) for strength in STRENGTHS]
    total = len(STRENGTHS) + math.fsum(likelihoods)
    return [
        (strength * dispersion, likelihood / total)
        for strength, likelihood in zip(STRENGTHS, likelihoods, strict=True)
    ]


def _evidence(counts: Sequence[tuple[float, float]], strength: float) -> float:
    """Log-likelihood ratio of the observed to the expected ends: rates drawn from a gamma distribution of
    this shape against equal rates, that is negative binomial against Poisson."""
    drawn = lgamma(strength)
    return math.fsum(
        lgamma(seen + strength)
        - drawn
        - (seen + strength) * log1p(expected / strength)
        - seen * log(strength)
        + expected
        for seen, expected in counts
    )

"""95 % confidence intervals over seeds, of a mean and of a ratio. Arithmetic only.

Formulas: R. Jain, The Art of Computer Systems Performance Analysis (1991): 13.2 (mean), 13.4.1 (pairs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its interval; no interval for a single seed."""

    value: float
    low: float | None = None
    high: float | None = None
    num_seeds: int = 1
    """Number of seeds it is based on."""

    @property
    def half_width(self) -> float | None:
        """Half the width of a symmetric interval."""
        return None if self.high is None else self.high - self.value


def mean_interval(values: Sequence[float]) -> Estimate:
    """Mean ± t(n-1) · s / √n, with s the sample's standard deviation. ``values`` must not be empty."""
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = student_t(n - 1) * math.sqrt(variance / n)
    return Estimate(mean, mean - half, mean + half, n)


def ratio_interval(pairs: Sequence[tuple[float, float]]) -> Estimate | None:
    """The second over the first of each pair; a pair is two runs of one seed, whose jobs are the same.

    Differences between the seeds' jobs thus cancel. The interval is the exponential of that of the mean of
    the logarithms of the ratios; the value is their geometric mean. None without pairs, or if a value is not
    positive and so has no logarithm.
    """
    if not pairs or any(before <= 0 or after <= 0 for before, after in pairs):
        return None
    log = mean_interval([math.log(after / before) for before, after in pairs])
    if log.low is None or log.high is None:
        return Estimate(math.exp(log.value))
    return Estimate(math.exp(log.value), math.exp(log.low), math.exp(log.high), len(pairs))


@cache
def student_t(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t, by bisection of its distribution.

    Uses the angle as the variable, so that the whole range is bounded: t = √degrees · tan θ.
    """
    low = 0.0
    high = math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _central_probability(degrees, middle) < LEVEL:
            low = middle
        else:
            high = middle
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(degrees: int, theta: float) -> float:
    """P(-t < T < t) for t = √degrees · tan θ. Abramowitz & Stegun, 26.7.3 (odd) and 26.7.4 (even)."""
    odd = degrees % 2
    cosine = math.cos(theta)
    term, series = (cosine, cosine) if odd else (1.0, 1.0)
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cosine**2
        series += term
    if not odd:
        return math.sin(theta) * series
    return 2 / math.pi * (theta + (math.sin(theta) * series if degrees > 1 else 0.0))

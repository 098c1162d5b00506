"""Means and percentiles, of values and of levels over time. Knows nothing of traces."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import accumulate
from math import fsum

import msgspec
import numpy as np


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles of values; percentiles interpolate between neighbors."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """Returns None without values."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return None
        p50, p95, p99 = np.percentile(array, (50, 95, 99)).tolist()
        return cls(
            count=array.size, mean=float(array.mean()), p50=p50, p95=p95, p99=p99, max=float(array.max())
        )


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a level over time, weighted by the time that each value lasted."""

    mean: float
    p50: float
    p95: float
    max: float

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> Level | None:
        """Returns the statistics of seconds by value; None if they sum to 0."""
        ordered = sorted((value, lasted_s) for value, lasted_s in seconds.items() if lasted_s > 0)
        if not ordered:
            return None
        until_s = list(accumulate(lasted_s for _, lasted_s in ordered))

        def reached(share: float) -> float:
            return ordered[min(bisect_left(until_s, share * until_s[-1]), len(ordered) - 1)][0]

        mean = fsum(value * lasted_s for value, lasted_s in ordered) / until_s[-1]
        return cls(mean=mean, p50=reached(0.5), p95=reached(0.95), max=ordered[-1][0])

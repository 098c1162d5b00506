"""The known distribution of the time until something ends. It does not know tools."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise


@dataclass(frozen=True, eq=False)
class SurvivalCurve:
    """P(D <= t) for a duration D: linear between ``edges_s``, flat beyond the last.

    If it ends below 1, the rest is the unknown tail: durations longer than any that was seen to end. All
    times are from the start of the call. Immutable.
    """

    edges_s: Sequence[float]
    """Edges in seconds, increasing from 0."""
    probabilities: Sequence[float]
    """P(D <= edge), never decreasing, from 0 to at most 1."""
    num_observations: float
    """Number of observations that the curve is based on (old and borrowed ones count in part); 0: nothing is
    known."""

    @cached_property
    def support(self) -> tuple[float, ...]:
        """Increasing times at which probability accumulates. A rule that weighs P(D <= t) against a cost that
        grows with t finds its best t among these, or at 0."""
        steps = zip(self.edges_s[1:], pairwise(self.probabilities), strict=True)
        return tuple(t for t, (p0, p1) in steps if p1 > p0)

    @cached_property
    def _areas(self) -> tuple[float, ...]:
        """E[min(D, edge)] for each edge."""
        steps = pairwise(zip(self.edges_s, self.probabilities, strict=True))
        areas = ((t1 - t0) * (1 - (p0 + p1) / 2) for (t0, p0), (t1, p1) in steps)
        return tuple(accumulate(areas, initial=0.0))

    def cdf(self, t_s: float) -> float:
        """P(D <= t)."""
        if t_s <= 0:
            return 0.0
        right = bisect_left(self.edges_s, t_s)
        if right == len(self.edges_s):
            return self.probabilities[-1]
        return _between(t_s, self.edges_s, self.probabilities, right)

    def quantile(self, q: float) -> float:
        """The smallest t with P(D <= t) >= q; inf if it is in the unknown tail."""
        if q <= 0:
            return 0.0
        right = bisect_left(self.probabilities, q)
        if right == len(self.probabilities):
            return math.inf
        return _between(q, self.probabilities, self.edges_s, right)

    @property
    def known_median_s(self) -> float | None:
        """The median; None if nothing was seen, or if it is in the unknown tail."""
        return self._known(self.median_remaining(0.0))

    def known_quantile(self, q: float) -> float | None:
        """The q-quantile; None if nothing was seen, or if it is in the unknown tail."""
        return self._known(self.quantile(q))

    def _known(self, seconds: float) -> float | None:
        return seconds if self.num_observations and math.isfinite(seconds) else None

    def median_remaining(self, elapsed_s: float) -> float:
        """Median of D - e given D > e; inf if it is in the unknown tail."""
        gone = self.cdf(elapsed_s)
        if gone >= 1:
            return math.inf
        return max(0.0, self.quantile((1 + gone) / 2) - max(0.0, elapsed_s))

    def expected_min(self, t_s: float) -> float:
        """E[min(D, t)]: the mean time of holding something until the end, but at most until t. For t = inf
        the mean of D (inf with an unknown tail)."""
        if t_s <= 0:
            return 0.0
        right = bisect_right(self.edges_s, t_s)
        left = right - 1
        alive = 1 - self.probabilities[left]
        if right == len(self.edges_s):
            return self._areas[left] + (alive * (t_s - self.edges_s[left]) if alive else 0.0)
        alive = (alive + 1 - self.cdf(t_s)) / 2
        return self._areas[left] + alive * (t_s - self.edges_s[left])

    def ended_by(self, limit_s: float) -> SurvivalCurve:
        """The curve if the call is stopped at ``limit_s``, as exactly as the edges allow; a limit beyond the
        last edge changes nothing."""
        first = bisect_left(self.edges_s, limit_s)
        ended = [1.0] * (len(self.edges_s) - first)
        return replace(self, probabilities=[*self.probabilities[:first], *ended])

    def after(self, elapsed_s: float) -> SurvivalCurve:
        """The curve of the remaining time, given that the call has not ended after ``elapsed_s``; nothing is
        known beyond the last edge."""
        gone = self.cdf(elapsed_s)
        if elapsed_s <= 0:
            return self
        if gone >= 1:
            return NOTHING_KNOWN
        first = bisect_right(self.edges_s, elapsed_s)
        edges_s = [0.0, *(edge - elapsed_s for edge in self.edges_s[first:])]
        probabilities = [0.0, *((p - gone) / (1 - gone) for p in self.probabilities[first:])]
        return SurvivalCurve(edges_s, probabilities, self.num_observations)

    def moved(self, levels: Sequence[float], factors: Sequence[float], floor_s: float) -> SurvivalCurve:
        """The curve with each time t at probability p replaced by (t + floor) x factor - floor: the factors
        are those of ``levels``, linear between them and constant beyond.

        The quantiles at the levels are edges of the result, so they move exactly by their factors.
        """
        known = self.probabilities[-1]
        quantiles = [(self.quantile(level), level) for level in levels if level <= known]
        points = sorted([*zip(self.edges_s, self.probabilities, strict=True), *quantiles])
        edges_s = [0.0]
        probabilities = [0.0]
        last_s = 0.0
        right = 0
        for time_s, probability in points[1:]:
            while right < len(levels) and levels[right] < probability:
                right += 1
            if 0 < right < len(levels):
                factor = _between(probability, levels, factors, right)
            else:
                factor = factors[0] if right == 0 else factors[-1]
            moved_s = (time_s + floor_s) * factor - floor_s
            last_s = moved_s if moved_s > last_s else math.nextafter(last_s, math.inf)
            edges_s.append(last_s)
            probabilities.append(probability)
        return SurvivalCurve(edges_s, probabilities, self.num_observations)

    def resting_on(self, num_observations: float) -> SurvivalCurve:
        """The same curve with another number of observations."""
        return replace(self, num_observations=num_observations)


NOTHING_KNOWN = SurvivalCurve((0.0,), (0.0,), 0.0)


def max_of(curves: Sequence[SurvivalCurve]) -> SurvivalCurve:
    """The time until the last of several independent durations that started together."""
    assert curves, "the maximum of nothing has no distribution"
    first = curves[0]
    if all(curve.edges_s is first.edges_s for curve in curves):
        edges = first.edges_s
        columns = [curve.probabilities for curve in curves]
    else:
        edges = sorted({edge for curve in curves for edge in curve.edges_s})
        columns = [[curve.cdf(edge) for edge in edges] for curve in curves]
    products = [math.prod(column) for column in zip(*columns, strict=True)]
    return SurvivalCurve(edges, products, min(curve.num_observations for curve in curves))


def _between(x: float, xs: Sequence[float], ys: Sequence[float], right: int) -> float:
    """y at x, on the line from point ``right - 1`` to ``right``; ``right > 0``."""
    x0 = xs[right - 1]
    x1 = xs[right]
    y0 = ys[right - 1]
    y1 = ys[right]
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))

"""Synthetic tool times: log-normal with a timeout, for several tools, with a published mean and spread.

Knows nothing of jobs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
_STEPS = 60
"""Steps of each bisection, enough for the last bit of a float."""


@dataclass(frozen=True, slots=True)
class ToolShape:
    """One tool relative to the others: frequency of calls, median time and spread of its logarithm."""

    tool: str
    command: str | None
    share: float
    median_s: float
    sigma: float


@dataclass(frozen=True, slots=True)
class ToolMix:
    """Tools whose times, over all calls, have a given mean and standard deviation.

    A call takes ``min(timeout_s, scale * LogNormal(ln median, spread * sigma))``. The shapes describe how
    tools differ; ``scale`` and ``spread`` are the same for all and give the whole mix its moments.
    """

    shapes: tuple[ToolShape, ...]
    scale: float
    spread: float
    timeout_s: float

    @classmethod
    def fit(cls, shapes: Sequence[ToolShape], mean_s: float, sd_s: float, timeout_s: float) -> ToolMix:
        """Bisects for the spread and, inside, for the scale: both moments grow with both."""
        low = 0.0
        high = 8.0
        for _ in range(_STEPS):
            spread = (low + high) / 2
            mix = cls._with_mean(shapes, mean_s, spread, timeout_s)
            if mix.moment(2) < sd_s**2 + mean_s**2:
                low = spread
            else:
                high = spread
        mix = cls._with_mean(shapes, mean_s, (low + high) / 2, timeout_s)
        assert math.isclose(mix.sd_s, sd_s, rel_tol=1e-3), f"no spread of these tools has sd {sd_s}"
        return mix

    @classmethod
    def _with_mean(
        cls, shapes: Sequence[ToolShape], mean_s: float, spread: float, timeout_s: float
    ) -> ToolMix:
        low = -60.0
        high = 20.0
        for _ in range(_STEPS):
            middle = (low + high) / 2
            mix = cls(tuple(shapes), math.exp(middle), spread, timeout_s)
            if mix.moment(1) < mean_s:
                low = middle
            else:
                high = middle
        return cls(tuple(shapes), math.exp((low + high) / 2), spread, timeout_s)

    @property
    def mean_s(self) -> float:
        """Mean duration of all calls."""
        return self.moment(1)

    @property
    def sd_s(self) -> float:
        """Standard deviation of the durations of all calls."""
        return math.sqrt(self.moment(2) - self.moment(1) ** 2)

    def moment(self, order: int) -> float:
        """E[D^order] of all calls."""
        return sum(shape.share * self._moment(shape, order) for shape in self.shapes) / self._shares

    def _moment(self, shape: ToolShape, order: int) -> float:
        """E[min(X, c)^k] of a log-normal X: the partial expectation of the part below c, and c^k above.

        exp(k mu + k^2 sigma^2 / 2) Phi((ln c - mu - k sigma^2) / sigma) + c^k (1 - Phi((ln c - mu) / sigma)):
        the first term is the log-normal's partial expectation (any text on that distribution).
        """
        mu = math.log(shape.median_s * self.scale)
        sigma = shape.sigma * self.spread
        cut = self.timeout_s
        if sigma == 0:
            return min(cut, math.exp(mu)) ** order
        below = _NORMAL.cdf((math.log(cut) - mu - order * sigma**2) / sigma)
        above = 1 - _NORMAL.cdf((math.log(cut) - mu) / sigma)
        whole = order * mu + (order * sigma) ** 2 / 2
        # The product of a huge and a vanishing factor: 0 where the second one is.
        return (math.exp(min(whole, 600.0)) * below if below else 0.0) + cut**order * above

    @property
    def _shares(self) -> float:
        return sum(shape.share for shape in self.shapes)

    def draw(self, rng: random.Random) -> tuple[ToolShape, float]:
        """Draws a call: its tool and its seconds (to the millisecond)."""
        shape = rng.choices(self.shapes, [shape.share for shape in self.shapes])[0]
        mu = math.log(shape.median_s * self.scale)
        sigma = shape.sigma * self.spread
        return shape, round(min(self.timeout_s, rng.lognormvariate(mu, sigma)), 3)

"""Learns what it costs to prefill tokens, from steps as they run. Knows nothing of models or hardware."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

DEFAULT_TOKENS_PER_S = 10_000.0
"""Until a step was seen."""
SMOOTHING = 0.2
"""Weight of a new step against what was seen of steps of its size."""
REFIT_AFTER = 32
"""So many new steps make a fit stale; while little is known each one does."""


class PrefillCost:
    """Seconds of a prefill step = a + b·n + c·n·(context + n/2), with a, b, c >= 0.

    ``n·(context + n/2)`` is the number of query-key pairs of attention: with no context the cost is quadratic
    in n, as in the profile of the Continuum paper (arXiv 2511.02230). Steps are averaged by size (factors of
    two), and all sizes weigh the same relative to their time, so that many small steps do not drown the few
    large ones and memory is bounded.
    """

    def __init__(
        self, default_tokens_per_s: float = DEFAULT_TOKENS_PER_S, smoothing: float = SMOOTHING
    ) -> None:
        """``default_tokens_per_s`` holds until a step was seen. ``smoothing``: weight of a new step against
        those of its size."""
        self._default_s_per_token = 1.0 / default_tokens_per_s
        self._smoothing = smoothing
        self._means: dict[tuple[int, int], FloatArray] = {}
        """By log2 of new and context tokens: mean of [1, n, pairs, seconds]."""
        self._coefficients: FloatArray | None = None
        self._num_new = 0
        self.num_observations = 0

    def observe(self, new_tokens: int, context_tokens: int, seconds: float) -> None:
        """A step computed ``new_tokens`` on top of ``context_tokens`` in ``seconds``. Nonsense is ignored."""
        if new_tokens <= 0 or context_tokens < 0 or not 0 < seconds < math.inf:
            return
        row = np.array([1.0, new_tokens, _num_pairs(new_tokens, context_tokens), seconds])
        size = (new_tokens.bit_length(), context_tokens.bit_length())
        mean = self._means.get(size)
        self._means[size] = row if mean is None else mean + self._smoothing * (row - mean)
        self.num_observations += 1
        self._num_new += 1
        if self._num_new >= min(REFIT_AFTER, self.num_observations / 4):
            self._coefficients = None

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds to compute the first ``num_tokens`` tokens of a prompt."""
        if num_tokens <= 0:
            return 0.0
        if not self._means:
            return num_tokens * self._default_s_per_token
        if self._coefficients is None:
            self._coefficients = _fit(np.array(list(self._means.values())))
            self._num_new = 0
        a, b, c = self._coefficients.tolist()
        return float(a + b * num_tokens + c * _num_pairs(num_tokens, 0))


def _num_pairs(new_tokens: int, context_tokens: int) -> float:
    return new_tokens * (context_tokens + new_tokens / 2)


def _fit(means: FloatArray) -> FloatArray:
    """Non-negative least squares of the relative error; means: [num_sizes, 4] -> coefficients [3].

    One size alone gives a rate, two a rate and a constant: more would be guessed. With so few columns every
    set of them is tried, and the best without a negative coefficient is the optimum.
    """
    relative = means[:, :3] / means[:, 3:]
    allowed = {1: (1,), 2: (0, 1)}.get(len(means), (0, 1, 2))
    best, best_error = np.zeros(3), math.inf
    for count in range(1, len(allowed) + 1):
        for columns in combinations(allowed, count):
            coefficients, error = _least_squares(relative[:, columns])
            if (coefficients >= 0).all() and error < best_error * (1 - 1e-9):
                best = np.zeros(3)
                best[list(columns)] = coefficients
                best_error = error
    return best


def _least_squares(columns: FloatArray) -> tuple[FloatArray, float]:
    """Coefficients that bring the weighted sum of ``columns`` closest to 1, and the squared error left."""
    scale = np.abs(columns).max(axis=0)
    solution = np.linalg.lstsq(columns / scale, np.ones(len(columns)), rcond=None)[0]
    error = float(((columns / scale @ solution - 1.0) ** 2).sum())
    return solution / scale, error

"""Learns the cost of prefilling tokens from steps as they run. It does not know models or hardware."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from estimator.plain_math import dot

DEFAULT_TOKENS_PER_S = 10_000.0
"""Rate that is used until a step has been seen."""
SMOOTHING = 0.2
"""Weight of a new step against the earlier steps of its size."""
REFIT_AFTER = 32
"""A fit is stale after this many new steps; while little is known, after a quarter of the steps seen."""
COLLINEAR = 1e-9
"""A column is left out if less than this remains of it after subtracting what the other columns explain."""


class _Steps(NamedTuple):
    """Means over the steps of one size class."""

    new_tokens: float
    pairs: float
    seconds: float


class PrefillCost:
    """Seconds of a prefill step = a + b·n + c·n·(context + n/2), with a, b, c >= 0.

    ``n·(context + n/2)`` is the number of query-key pairs of attention: with no context the cost is quadratic
    in n, as in the profile of the Continuum paper (arXiv 2511.02230). Steps are averaged by size (factors of
    two), and all sizes weigh the same relative to their time, so that the few large steps count as much as
    the many small ones, and memory is bounded.
    """

    def __init__(
        self, default_tokens_per_s: float = DEFAULT_TOKENS_PER_S, smoothing: float = SMOOTHING
    ) -> None:
        """``default_tokens_per_s`` is used until a step has been seen. ``smoothing`` is the weight
        of a new step against the earlier ones of its size."""
        self._default_s_per_token = 1.0 / default_tokens_per_s
        self._smoothing = smoothing
        self._means: dict[tuple[int, int], _Steps] = {}
        """Mean steps by the base-2 logarithms of new tokens and context tokens."""
        self._coefficients: Sequence[float] | None = None
        self._num_new = 0
        self.num_observations = 0

    def observe(self, new_tokens: int, context_tokens: int, seconds: float) -> None:
        """Records a step that computed ``new_tokens`` on top of ``context_tokens`` in ``seconds``. Invalid
        values are ignored."""
        if new_tokens <= 0 or context_tokens < 0 or not 0 < seconds < math.inf:
            return
        step = _Steps(new_tokens, _num_pairs(new_tokens, context_tokens), seconds)
        size = (new_tokens.bit_length(), context_tokens.bit_length())
        mean = self._means.get(size)
        self._means[size] = step if mean is None else self._nearer(mean, step)
        self.num_observations += 1
        self._num_new += 1
        if self._num_new >= min(REFIT_AFTER, self.num_observations / 4):
            self._coefficients = None

    def _nearer(self, mean: _Steps, step: _Steps) -> _Steps:
        return _Steps(*(old + self._smoothing * (new - old) for old, new in zip(mean, step, strict=True)))

    def seconds(self, num_tokens: int) -> float:
        """Expected seconds to compute the first ``num_tokens`` tokens of a prompt."""
        if num_tokens <= 0:
            return 0.0
        if not self._means:
            return num_tokens * self._default_s_per_token
        if self._coefficients is None:
            self._coefficients = _fit([*self._means.values()])
            self._num_new = 0
        a, b, c = self._coefficients
        return a + b * num_tokens + c * _num_pairs(num_tokens, 0)


def _num_pairs(new_tokens: int, context_tokens: int) -> float:
    return new_tokens * (context_tokens + new_tokens / 2)


def _fit(means: Sequence[_Steps]) -> Sequence[float]:
    """Returns a, b, c by non-negative least squares of the relative error.

    One size alone gives a rate, two a rate and a constant: more would be a guess. With so few columns all
    subsets are tried, and the best one without a negative coefficient is the optimum.
    """
    relative = [[1 / m.seconds for m in means]]
    relative += [[m.new_tokens / m.seconds for m in means], [m.pairs / m.seconds for m in means]]
    scales = [max(column) for column in relative]
    columns = [[x / scale for x in column] for column, scale in zip(relative, scales, strict=True)]
    allowed = {1: (1,), 2: (0, 1)}.get(len(means), (0, 1, 2))
    best = [0.0, 0.0, 0.0]
    best_error = math.inf
    for count in range(1, len(allowed) + 1):
        for chosen in combinations(allowed, count):
            found = _least_squares([columns[each] for each in chosen])
            if found is None:
                continue
            coefficients, error = found
            if min(coefficients) >= 0 and error < best_error * (1 - 1e-9):
                best = [0.0, 0.0, 0.0]
                for each, coefficient in zip(chosen, coefficients, strict=True):
                    best[each] = coefficient / scales[each]
                best_error = error
    return best


def _least_squares(columns: Sequence[list[float]]) -> tuple[list[float], float] | None:
    """Returns the coefficients that bring the weighted sum of ``columns`` closest to 1, and the remaining
    squared error; None if the columns are too similar.

    Uses Gram-Schmidt in plain arithmetic, because a library's result differs between CPUs.
    """
    left = [1.0] * len(columns[0])
    units: list[list[float]] = []
    shares: list[list[float]] = []
    """For each column: its coefficient on each earlier unit column, and then its remaining length."""
    explained: list[float] = []
    for column in columns:
        shares.append([])
        for unit in units:
            shares[-1].append(dot(unit, column))
            column = _without(column, unit, shares[-1][-1])
        length = math.sqrt(dot(column, column))
        if length < COLLINEAR:
            return None
        shares[-1].append(length)
        units.append([x / length for x in column])
        explained.append(dot(units[-1], left))
        left = _without(left, units[-1], explained[-1])
    coefficients = [0.0] * len(columns)
    for place in reversed(range(len(columns))):
        known = dot(
            (shares[later][place] for later in range(place + 1, len(columns))), coefficients[place + 1 :]
        )
        coefficients[place] = (explained[place] - known) / shares[place][place]
    return coefficients, dot(left, left)


def _without(column: list[float], unit: list[float], share: float) -> list[float]:
    return [x - share * y for x, y in zip(column, unit, strict=True)]

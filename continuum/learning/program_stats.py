"""What past jobs say about new ones: how long turns that lost their KV waited, and how well age predicts the
remaining turns."""

from __future__ import annotations

import math
from collections import deque

QUEUE_DELAY_WINDOW = 100
"""Number of returns over which the mean wait is taken; the paper does not state its window."""


class QueueDelay:
    """Sliding mean of the time that turns without a pin waited (T̄ of arXiv 2511.02230); 0 before any."""

    def __init__(self) -> None:
        self._waits_s: deque[float] = deque(maxlen=QUEUE_DELAY_WINDOW)

    def observe(self, wait_s: float) -> None:
        self._waits_s.append(wait_s)

    @property
    def mean_s(self) -> float:
        return math.fsum(self._waits_s) / len(self._waits_s) if self._waits_s else 0.0


class ReloadCost:
    """Recent cost of loading KV back from host memory.

    The total seconds of the loads over their total tokens: a load of one block spends nearly all its time
    waiting for the end of a step.
    """

    def __init__(self, smoothing: float) -> None:
        """``smoothing`` is the weight of a new load against earlier ones."""
        self._smoothing = smoothing
        self._seconds = self._tokens = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        if num_tokens <= 0 or seconds < 0:
            return
        self._seconds += self._smoothing * (seconds - self._seconds)
        self._tokens += self._smoothing * (num_tokens - self._tokens)

    def seconds(self, num_tokens: int) -> float | None:
        """Seconds to load this many tokens; None before any load."""
        return num_tokens * self._seconds / self._tokens if self._tokens else None


class RecomputedShare:
    """Recent share of the tokens of returning turns that had to be recomputed.

    0 while evicted blocks are found in host memory; near 1 where the begun jobs need more than both tiers
    have, so that each turn evicts what another one will need.
    """

    def __init__(self, smoothing: float) -> None:
        """``smoothing`` is the weight of a new return against earlier ones."""
        self._smoothing = smoothing
        self._known = self._recomputed = 0.0

    def observe(self, num_known_tokens: int, num_recomputed_tokens: int) -> None:
        self._known += self._smoothing * (num_known_tokens - self._known)
        self._recomputed += self._smoothing * (num_recomputed_tokens - self._recomputed)

    @property
    def value(self) -> float:
        return self._recomputed / self._known if self._known else 0.0


class Memoryfulness:
    """η = −Corr(k, N−k) over ended jobs of N turns and k = 1..N turns served (arXiv 2511.02230).

    1 if all jobs are equally long, 0 if the turns served say nothing about the remaining ones, less
    if jobs with many turns served have the most to come.
    """

    def __init__(self) -> None:
        self.num_jobs = 0.0
        """Number of jobs that have ended."""
        self._n = 0.0
        self._sum_k = self._sum_r = self._sum_kk = self._sum_rr = self._sum_kr = 0.0

    def observe_job(self, num_turns: int, count: float = 1.0) -> None:
        """Counts an ended job with this many turns; a ``count`` of -1 undoes that."""
        n = num_turns
        self.num_jobs += count
        sum_k = n * (n + 1) / 2
        sum_kk = n * (n + 1) * (2 * n + 1) / 6
        self._n += count * n
        self._sum_k += count * sum_k
        self._sum_r += count * n * (n - 1) / 2
        self._sum_kk += count * sum_kk
        self._sum_rr += count * (n - 1) * n * (2 * n - 1) / 6
        self._sum_kr += count * (n * sum_k - sum_kk)

    @property
    def value(self) -> float:
        """1, the paper's cold start, until jobs of more than one turn have ended."""
        n = self._n
        variance_k = n * self._sum_kk - self._sum_k * self._sum_k
        variance_r = n * self._sum_rr - self._sum_r * self._sum_r
        if n < 2 or variance_k <= 0 or variance_r <= 0:
            return 1.0
        return -(n * self._sum_kr - self._sum_k * self._sum_r) / math.sqrt(variance_k * variance_r)

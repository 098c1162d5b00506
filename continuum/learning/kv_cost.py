"""The cost of evicted KV: to recompute it, or to load it back from host memory."""

from __future__ import annotations

from continuum.jobs.job import Turn
from continuum.learning.program_stats import ReloadCost
from continuum.tuning import Tuning
from estimator.cost import PrefillCost
from estimator.plain_math import exp

LOAD_WINDOW_S = 60.0
"""Prompts that were computed this long ago count 1/e in the load."""


class PrefillLoad:
    """Recent mean number of turns whose prompts are computed at the same time: how many others a second of
    recomputation delays."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._seen_s = self._prefill_s = 0.0

    def observe(self, seconds: float, now: float) -> None:
        """Adds the seconds from a turn's first step to its first token."""
        if self._began_s is None:
            self._began_s = now
        self._prefill_s = self._prefill_s * exp((self._seen_s - now) / LOAD_WINDOW_S) + seconds
        self._seen_s = now

    def value(self, now: float) -> float:
        if self._began_s is None:
            return 0.0
        window_s = LOAD_WINDOW_S * (1 - exp(-max(1.0, now - self._began_s) / LOAD_WINDOW_S))
        return self._prefill_s * exp((self._seen_s - now) / LOAD_WINDOW_S) / window_s


class KvCost:
    """Learns the cost of recomputing and of loading KV from turns as they run."""

    def __init__(self, tuning: Tuning, *, has_host_tier: bool) -> None:
        self.has_host_tier = has_host_tier
        self._first_reload_share = tuning.first_reload_share
        self._prefill = PrefillCost(tuning.first_tokens_per_s, smoothing=tuning.prefill_smoothing)
        self._reload = ReloadCost(tuning.reload_smoothing)
        self._load = PrefillLoad()

    def observe(self, turn: Turn, now: float) -> None:
        """Learns the cost of a cold turn from the time between its first scheduling and its first token, and
        that of a load from the time between admission and first scheduling."""
        request = turn.request
        started_s = request.first_scheduled_time
        first_token_s = request.first_token_time
        if started_s is None or first_token_s is None:
            return
        self._load.observe(first_token_s - started_s, now)
        if request.num_preemptions:
            return
        if request.num_external_computed_tokens and turn.admitted_s is not None:
            self._reload.observe(request.num_external_computed_tokens, started_s - turn.admitted_s)
        num_cached = request.num_cached_tokens or 0
        self._prefill.observe(request.num_prompt_tokens - num_cached, num_cached, first_token_s - started_s)

    def prefill_s(self, num_tokens: int) -> float:
        return self._prefill.seconds(num_tokens)

    def reload_s(self, num_tokens: int) -> float | None:
        """Seconds to load KV back; None if nothing is offloaded. Before the first load, a share of the
        recomputation time."""
        if not self.has_host_tier:
            return None
        known_s = self._reload.seconds(num_tokens)
        return self.prefill_s(num_tokens) * self._first_reload_share if known_s is None else known_s

    def restore_s(self, num_tokens: int) -> float:
        """Seconds to load KV back, or to recompute it where nothing is offloaded."""
        reload_s = self.reload_s(num_tokens)
        return self.prefill_s(num_tokens) if reload_s is None else reload_s

    def delay_s(self, restore_s: float, now: float) -> float:
        """Seconds that all turns together wait longer for a restoration of ``restore_s`` seconds: the prompts
        that are computed at the same time share the device."""
        return restore_s * max(1.0, self._load.value(now))

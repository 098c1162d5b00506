"""The cost of evicted KV: to recompute it, or to load it back from host memory."""

from __future__ import annotations

from continuum.jobs.job import Turn
from continuum.learning.program_stats import ReloadCost
from continuum.tuning import Tuning
from estimator.cost import PrefillCost


class KvCost:
    """Learns the cost of recomputing and of loading KV from turns as they run."""

    def __init__(self, tuning: Tuning, *, has_host_tier: bool) -> None:
        self.has_host_tier = has_host_tier
        self._first_reload_share = tuning.first_reload_share
        self._prefill = PrefillCost(tuning.first_tokens_per_s, smoothing=tuning.prefill_smoothing)
        self._reload = ReloadCost(tuning.reload_smoothing)

    def observe(self, turn: Turn) -> None:
        """Learns the cost of a cold turn from the time between its first scheduling and its first token, and
        that of a load from the time between admission and first scheduling."""
        request = turn.request
        started_s = request.first_scheduled_time
        first_token_s = request.first_token_time
        if request.num_preemptions or started_s is None or first_token_s is None:
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

"""Prometheus counters of speculative decoding, under V1's names; there are none where nothing is drafted."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from engine.reported_stats import SpecDecodingStats


class SpecDecodingMetrics:
    """What became of draft tokens, since the server started."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: tuple[str, ...],
        values: tuple[str, ...],
        num_speculative_tokens: int,
    ) -> None:
        """Each place that a draft can have begins at 0, as in V1."""
        self._values = values

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=registry).labels(*values)

        self._drafts = counter(
            "vllm:spec_decode_num_drafts", "Drafts verified: one per request and step that had any."
        )
        self._draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted_tokens = counter(
            "vllm:spec_decode_num_accepted_tokens", "Tokens that steps with drafts brought beyond one."
        )
        self._accepted_per_pos = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the draft.",
            (*labels, "position"),
            registry=registry,
        )
        for place in range(num_speculative_tokens):
            self._accepted_per_pos.labels(*values, str(place))

    def record(self, stats: SpecDecodingStats) -> None:
        """Add what the core counted since its last report."""
        self._drafts.inc(stats.num_drafts)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted_tokens.inc(stats.num_accepted_tokens)
        for place, count in enumerate(stats.num_accepted_tokens_per_pos):
            self._accepted_per_pos.labels(*self._values, str(place)).inc(count)

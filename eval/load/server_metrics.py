"""Reads the Prometheus series that a measurement needs; a series that a server lacks is None, not zero."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import zip_longest

from prometheus_client.parser import text_string_to_metric_families

from eval.load.records import EngineCounters, VerifiedDrafts

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
PINS = "continuum:pins"
PINS_ENDED = "continuum:pins_ended_total"
PIN_BLOCK_S = "continuum:pin_block_seconds_total"
GENERATED = "vllm:generation_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_BY_PLACE = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
CACHE_CONFIG = "vllm:cache_config_info"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics:
    """One reading of ``/metrics``."""

    running: float | None
    waiting: float | None
    kv_usage: float | None
    """Share of the pool that is in use, 0 to 1."""
    preemptions: float | None
    pins: float | None
    """Number of live pins."""
    pins_ended: dict[str, float]
    """Ended pins by cause; empty where the server has no pins."""
    pin_block_s: dict[str, float]
    """Pinned KV blocks times seconds, by cause of the end."""
    block_size: int | None
    """Tokens per KV block."""
    num_blocks: int | None
    """Usable KV blocks."""
    drafts: VerifiedDrafts | None
    """None where the server does not draft."""

    @classmethod
    def parse(cls, text: str) -> ServerMetrics:
        """Parses the exposition format; sums series of one name over their labels."""
        totals: dict[str, float] = {}
        by_cause: dict[str, defaultdict[str, float]] = {
            PINS_ENDED: defaultdict(float),
            PIN_BLOCK_S: defaultdict(float),
        }
        caches: list[dict[str, str]] = []
        by_place: Counter[int] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not math.isfinite(sample.value):
                    continue  # not measured yet, or no limit
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
                if sample.name in by_cause:
                    by_cause[sample.name][sample.labels.get("cause", "?")] += sample.value
                if sample.name == ACCEPTED_BY_PLACE:
                    by_place[_whole(sample.labels.get("position")) or 0] += round(sample.value)
                if sample.name == CACHE_CONFIG:
                    caches.append(sample.labels)
        return cls(
            running=totals.get(RUNNING),
            waiting=totals.get(WAITING),
            kv_usage=totals.get(KV_USAGE),
            preemptions=totals.get(PREEMPTIONS),
            pins=totals.get(PINS),
            pins_ended=dict(by_cause[PINS_ENDED]),
            pin_block_s=dict(by_cause[PIN_BLOCK_S]),
            block_size=next((_whole(cache.get("block_size")) for cache in caches), None),
            num_blocks=_num_blocks(caches),
            drafts=_drafts(totals, by_place),
        )

    @property
    def idle(self) -> bool:
        """Whether the server reports no running and no waiting request."""
        return not self.running and not self.waiting

    def preemptions_since(self, before: ServerMetrics) -> int | None:
        if self.preemptions is None:
            return None
        return round(self.preemptions - (before.preemptions or 0.0))

    def pins_ended_since(self, before: ServerMetrics) -> dict[str, int]:
        """The number of pins that ended between two readings, by cause; leaves out causes with none."""
        counts = {cause: round(n - before.pins_ended.get(cause, 0.0)) for cause, n in self.pins_ended.items()}
        return {cause: count for cause, count in sorted(counts.items()) if count}

    def drafts_since(self, before: ServerMetrics) -> VerifiedDrafts | None:
        """Returns the counts of drafts between two readings."""
        now = self.drafts
        then = before.drafts
        if now is None or then is None:
            return now
        pairs = zip_longest(now.accepted_by_place, then.accepted_by_place, fillvalue=0)
        return VerifiedDrafts(
            num_drafts=now.num_drafts - then.num_drafts,
            drafted_tokens=now.drafted_tokens - then.drafted_tokens,
            accepted_tokens=now.accepted_tokens - then.accepted_tokens,
            accepted_by_place=[one - other for one, other in pairs],
            output_tokens=now.output_tokens - then.output_tokens,
        )

    def counters_since(self, before: ServerMetrics) -> EngineCounters:
        """Returns the engine's counters between two readings, where it reports them."""
        held = {
            cause: block_s - before.pin_block_s.get(cause, 0.0) for cause, block_s in self.pin_block_s.items()
        }
        return EngineCounters(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_preemptions=self.preemptions_since(before),
            pins_ended=self.pins_ended_since(before),
            pin_block_s={cause: block_s for cause, block_s in sorted(held.items()) if block_s},
            kv_usage_at_end=self.kv_usage,
            drafts=self.drafts_since(before),
        )


def _drafts(totals: dict[str, float], by_place: Counter[int]) -> VerifiedDrafts | None:
    """Returns the counts since the server began; None if it has no such series."""
    if DRAFTS not in totals:
        return None
    return VerifiedDrafts(
        num_drafts=round(totals[DRAFTS]),
        drafted_tokens=round(totals.get(DRAFTED, 0.0)),
        accepted_tokens=round(totals.get(ACCEPTED, 0.0)),
        accepted_by_place=[by_place[place] for place in range(max(by_place, default=-1) + 1)],
        output_tokens=round(totals.get(GENERATED, 0.0)),
    )


def _num_blocks(caches: list[dict[str, str]]) -> int | None:
    """Returns the usable blocks of all engines; V1 reserves one block of each engine as padding."""
    counts = [_whole(cache.get("num_gpu_blocks")) for cache in caches]
    known = [count for count in counts if count is not None]
    return sum(known) - len(known) if known else None


def _whole(text: str | None) -> int | None:
    """Parses a count in a label; None if the server has not measured its pool yet and reports 'None'."""
    return int(text) if text is not None and text.isdigit() else None

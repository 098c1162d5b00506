"""Sums what the engines of a simulation have counted, in the form of a measured run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eval.load.records import EngineCounters, VerifiedDrafts
from eval.sim.replicas.replica import ReplicaCounts

if TYPE_CHECKING:
    from eval.sim.sim_config import SimConfig


def engine_counters(config: SimConfig, counts: Sequence[ReplicaCounts], output_tokens: int) -> EngineCounters:
    """``output_tokens`` counts those of all turns."""
    num_blocks = config.num_blocks * len(counts)
    pins_ended = Counter[str]()
    pin_block_s = Counter[str]()
    for each in counts:
        pins_ended.update(each.pins_ended)
        pin_block_s.update(each.pin_block_s)
    num_loaded = sum(each.num_loaded_tokens for each in counts)
    num_from_disk = sum(each.num_disk_tokens for each in counts)
    drafts = VerifiedDrafts.of((each.drafts for each in counts), output_tokens)
    return EngineCounters(
        block_size=config.kv_tokens / config.num_blocks if config.has_windows else config.block_size,
        num_blocks=num_blocks,
        num_preemptions=sum(each.num_preemptions for each in counts),
        computed_prefill_tokens=sum(each.num_computed_tokens for each in counts),
        pins_ended=dict(sorted(pins_ended.items())),
        pin_block_s={cause: round(held, 3) for cause, held in sorted(pin_block_s.items())},
        host_tokens_loaded=num_loaded if config.host_kv_tokens else None,
        disk_tokens_loaded=num_from_disk if config.disk_kv_tokens else None,
        kv_usage_at_end=sum(each.num_used_blocks for each in counts) / num_blocks,
        drafts=drafts if config.drafts is not None else None,
    )

"""The order in which the scheduler calls its parts, with the reasons for it."""

from __future__ import annotations

from collections.abc import Iterable

from engine.config.engine_config import SchedulerConfig
from engine.core.adapter_slots import AdapterCounts
from engine.core.draft_tokens import DraftTokens
from engine.core.encoder_cache_manager import EncoderCacheManager
from engine.core.fairness.step_shares import StepShares
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.kv_leases import KVLeases
from engine.core.parts import Parts, SchedulerPart
from engine.core.routed_experts import RoutedExpertsStore
from engine.core.state_alignment import StateAlignment

ORDER: tuple[type[SchedulerPart], ...] = (
    StepShares,  # first: the limits on its requests then cut an owner's share of a step further
    EncoderCacheManager,  # after shares: a share must not end in a picture that is computed whole
    StateAlignment,  # last of those that cut: it only shortens, and what it leaves ends with a block
    AdapterCounts,  # after pictures: a request that waits for the encoder takes no slot of an adapter
    KVLeases,  # has no limits, and reads no other part
    DraftTokens,  # before steps in flight reserve places, which depends on a plan's number of drafts
    RoutedExpertsStore,
)


def own_parts(config: SchedulerConfig, kv: KVCacheManager, drafts: DraftTokens, leases: KVLeases) -> Parts:
    """The parts that a scheduler's configuration turns on, beside those that requests may use at any time."""
    parts: list[SchedulerPart] = [drafts, leases]
    if config.enable_chunked_prefill:
        parts.append(StepShares())
    if kv.states is not None and kv.enable_caching:
        parts.append(StateAlignment(kv))
    if config.max_loras is not None:
        parts.append(AdapterCounts(config.max_loras))
    return in_order(parts)


def in_order(parts: Iterable[SchedulerPart]) -> Parts:
    """Sort parts by ``ORDER``; those that it does not list come last."""
    ranks = {kind: rank for rank, kind in enumerate(ORDER)}
    return Parts(sorted(parts, key=lambda part: ranks.get(type(part), len(ORDER))))

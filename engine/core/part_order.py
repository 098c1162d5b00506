"""The scheduler's parts, in the order in which they are asked, with the reasons for it."""

from __future__ import annotations

from collections.abc import Iterable

from engine.config import SchedulerConfig
from engine.core.adapter_slots import AdapterCounts
from engine.core.draft_tokens import DraftTokens
from engine.core.encoder_cache_manager import EncoderCacheManager
from engine.core.fairness.step_shares import StepShares
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.parts import Parts, SchedulerPart
from engine.core.routed_experts import RoutedExpertsStore
from engine.core.state_alignment import StateAlignment

ORDER: tuple[type[SchedulerPart], ...] = (
    StepShares,  # first: what an owner may have of a step is cut further by what its requests are
    EncoderCacheManager,  # behind shares: a share must not end in a picture that is computed whole
    StateAlignment,  # last of those that cut: it may only shorten, and what it leaves ends with a block
    AdapterCounts,  # behind pictures: a request that waits for the encoder takes no slot of an adapter
    DraftTokens,  # before steps under way reserve places, which read how many drafts a plan has
    RoutedExpertsStore,
)


def own_parts(config: SchedulerConfig, kv: KVCacheManager, drafts: DraftTokens) -> Parts:
    """The parts of a scheduler that its own configuration turns on."""
    parts: list[SchedulerPart] = [drafts]
    if config.enable_chunked_prefill:
        parts.append(StepShares())
    if kv.states is not None and kv.enable_caching:
        parts.append(StateAlignment(kv))
    if config.max_loras is not None:
        parts.append(AdapterCounts(config.max_loras))
    return in_order(parts)


def in_order(parts: Iterable[SchedulerPart]) -> Parts:
    """Those that the order names come first."""
    ranks = {kind: rank for rank, kind in enumerate(ORDER)}
    return Parts(sorted(parts, key=lambda part: ranks.get(type(part), len(ORDER))))

"""Decides which layers of a model share a block table."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from engine.config import CacheConfig
from engine.kv_cache_groups import KVCacheGroup, groups_of, num_slots, one_group
from engine.worker.models.base import CausalModel

logger = logging.getLogger(__name__)


def choose_groups(model: CausalModel, cache: CacheConfig) -> tuple[KVCacheGroup, ...]:
    """The KV cache groups of a model's layers: by their windows and chunks, or one of full attention if the
    user wishes it."""
    groups = groups_of(model.windows, model.chunks)
    has_windows = not all(group.is_full for group in groups)
    if has_windows and cache.disable_hybrid_kv_cache_manager:
        return one_group(len(model.windows))
    if has_windows:
        logger.info("A KV block holds %d layers: %s.", num_slots(groups), _described(groups))
    return groups


def _described(groups: Sequence[KVCacheGroup]) -> str:
    """Such as: 12 layers attend to everything (1 block table), 12 to the last 128 tokens (1)."""
    layers, tables = Counter[str](), Counter[str]()
    for group in groups:
        seen = _seen_by(group)
        layers[seen] += len(group.layers)
        tables[seen] += 1
    return ", ".join(
        f"{count} attend to {seen} ({tables[seen]} block table{'s' * (tables[seen] > 1)})"
        for seen, count in layers.items()
    )


def _seen_by(group: KVCacheGroup) -> str:
    if group.sliding_window is not None:
        return f"the last {group.sliding_window} tokens"
    return "everything" if group.attention_chunk is None else f"chunks of {group.attention_chunk} tokens"

"""Decides which layers of a model share a block table, and what their cache looks like."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from math import lcm

import torch
from msgspec.structs import replace

from engine.config.engine_config import CacheConfig
from engine.errors import ConfigError
from engine.records.kv_cache_groups import KVCacheGroup, groups_of, num_slots, one_group
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder

logger = logging.getLogger(__name__)


def choose_groups(model: CausalModel, cache: CacheConfig) -> tuple[KVCacheGroup, ...]:
    """The KV cache groups of a model's layers, of all stages: grouped by window and chunk, or one group of
    full attention if the user disables hybrid groups."""
    windows = model.windows
    chunks = model.chunks
    if isinstance(model, Decoder):
        windows = model.all_windows
        chunks = model.all_chunks
    slots = _slots_of(_all_heads(model))
    groups = groups_of(windows, chunks, slots or None)
    has_windows = not all(group.is_full for group in groups)
    if has_windows and cache.disable_hybrid_kv_cache_manager:
        return one_group(len(windows), lcm(*slots))
    if has_windows:
        logger.info("A KV block holds %d layers: %s.", num_slots(groups), _described(groups))
    return groups


def _all_heads(model: CausalModel) -> tuple[tuple[int, int], ...]:
    """See ``Decoder.all_heads``, which models of transformers have, too."""
    heads: tuple[tuple[int, int], ...] = getattr(model, "all_heads", ())
    return heads


def _slots_of(all_heads: Sequence[tuple[int, int]]) -> list[int]:
    """The slots of a block that each layer with keys and values of its own takes, in units of the smallest
    ones; empty: one. ConfigError if they are no multiples of these."""
    sizes = [heads * head_dim for heads, head_dim in all_heads]
    smallest = min(sizes, default=1)
    if any(size % smallest for size in sizes):
        raise ConfigError(
            f"keys of this model's layers have {smallest} and {max(sizes)} numbers on each rank: sizes must "
            "be multiples of the smallest. Try another tensor_parallel_size."
        )
    return [size // smallest for size in sizes]


def cached_heads(model: CausalModel) -> tuple[tuple[int, int], ...]:
    """See ``KvCacheSpec.layer_heads``: of this stage's layers."""
    heads = _all_heads(model)
    if not heads or not isinstance(model, Decoder) or model.is_whole:
        return heads
    return tuple(heads[layer] for layer in model.layer_numbers)


def cache_spec(
    model: CausalModel, groups: tuple[KVCacheGroup, ...], dtype: torch.dtype, block_size: int
) -> KvCacheSpec:
    """The spec of a model's cache, whose numbers are of ``dtype``. ``groups``: of this stage's layers."""
    return KvCacheSpec(
        groups=groups,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
        block_size=block_size,
        num_vectors=model.num_kv_vectors,
        layer_heads=cached_heads(model),
    )


def groups_here(model: CausalModel, groups: tuple[KVCacheGroup, ...]) -> tuple[KVCacheGroup, ...]:
    """The same groups with this stage's layers only, numbered from 0. ConfigError if a group has none."""
    if not isinstance(model, Decoder) or model.is_whole:
        return groups
    here = model.layer_numbers
    local = tuple(
        replace(group, layers=tuple(here.index(layer) for layer in group.layers if layer in here))
        for group in groups
    )
    for group in local:
        if not group.layers:
            raise ConfigError(
                "pipeline_parallel_size is too large for this model: none of layers "
                f"{here.start} to {here.stop - 1} attends to {_seen_by(group)}."
            )
    return local


def _described(groups: Sequence[KVCacheGroup]) -> str:
    """Returns, for example: 12 layers attend to everything (1 block table), 12 to the last 128 tokens (1)."""
    layers = Counter[str]()
    tables = Counter[str]()
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

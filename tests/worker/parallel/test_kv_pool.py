"""The size of the KV pool of several ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from engine.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import ModelLoadError
from engine.records.kv_cache_groups import groups_of, one_group
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.kv_pool import choose_num_blocks
from tests.worker.parallel.ranks import LoneRank

SPEC = KvCacheSpec(groups=one_group(2), num_kv_heads=1, head_dim=16, dtype=torch.float32, block_size=16)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankBesideASmaller(LoneRank):
    """A rank with a neighbor that has memory for ``room`` blocks."""

    room: int

    def smallest(self, number: int) -> int:
        return min(number, self.room)


def num_blocks(group: RankBesideASmaller, **cache: int) -> int:
    config = EngineConfig(model=ModelConfig(model="m"), cache=CacheConfig(**cache))  # type: ignore[arg-type]
    return choose_num_blocks(config, SPEC, 256, CPU, 0, group)


def test_a_group_with_a_window_needs_its_window_and_what_a_step_writes() -> None:
    """Bytes are those of the layers whose KV is in a block."""
    groups = groups_of([None, 40, 40, None])
    spec = KvCacheSpec(groups=groups, num_kv_heads=1, head_dim=16, dtype=torch.float32, block_size=16)
    assert spec.bytes_per_block == SPEC.bytes_per_block
    assert spec.blocks_for(16 * 1000, step_tokens=100) == 1000 + 3 + 7 + 1
    assert spec.blocks_for(48, step_tokens=100) == 2 * 3


def test_memory_is_taken_exactly_and_what_does_not_fit_says_what_would() -> None:
    """The pool has the blocks that the bytes hold; if that is too few, the error has a length that fits."""
    spec = replace(SPEC, groups=groups_of([None, 40, 40, None]))
    config = EngineConfig(
        model=ModelConfig(model="m"),
        cache=CacheConfig(kv_cache_memory_bytes=30 * spec.bytes_per_block + 5),
        scheduler=SchedulerConfig(max_num_batched_tokens=16),
    )
    # A sequence of 22 blocks of tokens holds 22, 3 of its window, and 3 for the writes of two steps.
    assert choose_num_blocks(config, spec, 22 * 16, CPU, 0) == 30
    assert choose_num_blocks(config, spec, 23 * 16, CPU, 0) == 30
    with pytest.raises(ModelLoadError, match=f"needs 31 KV blocks .* at most {23 * 16} or"):
        choose_num_blocks(config, spec, 23 * 16 + 1, CPU, 0)


def test_the_smallest_rank_says_how_many_blocks_there_are() -> None:
    """A block is divided among the ranks: all have the same blocks."""
    assert num_blocks(RankBesideASmaller(0, 2, room=40)) == 40
    assert num_blocks(RankBesideASmaller(0, 2, room=10**9)) == 128 * 256 // 16 + 1
    with pytest.raises(ModelLoadError, match="maximum context length of 256"):
        num_blocks(RankBesideASmaller(0, 2, room=10))


def test_a_size_in_bytes_is_that_of_a_rank() -> None:
    """As in V1, ``kv_cache_memory_bytes`` is the memory of each rank."""
    assert num_blocks(RankBesideASmaller(0, 2, room=1), kv_cache_memory_bytes=30 * SPEC.bytes_per_block) == 30

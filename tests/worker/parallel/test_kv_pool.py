"""How large the KV pool of several ranks is."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.errors import ModelLoadError
from engine.kv_cache_groups import one_group
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.kv_pool import choose_num_blocks
from tests.worker.parallel.ranks import LoneRank

SPEC = KvCacheSpec(groups=one_group(2), num_kv_heads=1, head_dim=16, dtype=torch.float32, block_size=16)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankBesideASmaller(LoneRank):
    """One whose neighbour has room for so many blocks."""

    room: int

    def smallest(self, number: int) -> int:
        return min(number, self.room)


def num_blocks(group: RankBesideASmaller, **cache: int) -> int:
    config = EngineConfig(model=ModelConfig(model="m"), cache=CacheConfig(**cache))  # type: ignore[arg-type]
    return choose_num_blocks(config, SPEC, 256, CPU, 0, group)


def test_the_smallest_rank_says_how_many_blocks_there_are() -> None:
    """A block is cut into as many parts as there are ranks: all have the same blocks."""
    assert num_blocks(RankBesideASmaller(0, 2, room=40)) == 40
    assert num_blocks(RankBesideASmaller(0, 2, room=10**9)) == 128 * 256 // 16 + 1
    with pytest.raises(ModelLoadError, match="maximum context length of 256"):
        num_blocks(RankBesideASmaller(0, 2, room=10))


def test_a_size_in_bytes_is_that_of_a_rank() -> None:
    """As in V1: ``kv_cache_memory_bytes`` is what each takes of its device."""
    assert num_blocks(RankBesideASmaller(0, 2, room=1), kv_cache_memory_bytes=30 * SPEC.bytes_per_block) == 30

"""Converts between blocks of a pool or a tier and tokens whose KV of all layers takes as many bytes."""

from __future__ import annotations

from dataclasses import dataclass

from engine.records.kv_cache_groups import KVCacheGroup, attention_groups, num_blocks_held, num_slots


@dataclass(frozen=True, slots=True)
class KvSizes:
    """Sizes for a model with these groups: a block holds ``block_size`` tokens of one group's layers."""

    block_size: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def _layers_and_slots(self) -> tuple[int, int]:
        groups = attention_groups(self.groups)
        return sum(len(group.layers) for group in groups), num_slots(groups)

    @property
    def tokens_per_block(self) -> float:
        """Tokens whose KV takes the bytes of a block."""
        num_layers, slots = self._layers_and_slots
        return self.block_size * slots / num_layers

    def num_blocks(self, num_tokens: int) -> int:
        """Whole blocks that fit into the bytes of this many tokens."""
        num_layers, slots = self._layers_and_slots
        return num_tokens * num_layers // (slots * self.block_size)

    def num_tokens(self, num_blocks: int) -> int:
        """Whole tokens whose KV takes the bytes of this many blocks."""
        num_layers, slots = self._layers_and_slots
        return num_blocks * slots * self.block_size // num_layers

    def num_loaded_tokens(self, num_tokens: int) -> int:
        """Tokens that a context counts as when it is loaded back: of a sliding window, only the last ones."""
        if all(group.is_full for group in self.groups):
            return num_tokens
        num_blocks = -(-num_tokens // self.block_size)
        return self.num_tokens(num_blocks_held(self.groups, self.block_size, num_blocks))

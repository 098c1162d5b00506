"""The KV cache groups of a model: layers that need the same blocks of a sequence share a block table.

All groups share one pool. A block has a slot for each layer of a group, so that any group can use any block:
groups have equally many layers, but for one that leaves its last slots unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

_NEARLY_EQUAL = 1.25
"""If the largest kind of layer has at most this many times the layers of the smallest, unused slots cost less
than more groups do."""


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers with the same attention pattern, which share a block table."""

    layers: tuple[int, ...]
    """The indices of the layers. The layer at position i uses slot i of each block."""
    sliding_window: int | None = None
    """Tokens that a token sees, itself included, or None if it sees all tokens before it."""

    @property
    def is_full(self) -> bool:
        """Whether a token sees all tokens before it."""
        return self.sliding_window is None


ONE_FULL_GROUP = (KVCacheGroup(layers=(0,)),)
"""The groups of a model whose layers are all alike, as far as their number does not matter."""


def groups_of(windows: Sequence[int | None]) -> tuple[KVCacheGroup, ...]:
    """Group layers by their sliding window, None for full attention; full attention comes first.

    The layers of one kind are dealt out to its groups in turn, as V1 does.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    size = _layers_per_group(map(len, kinds.values()))
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0] is not None, kind[0] or 0))
    return tuple(
        KVCacheGroup(tuple(layers[first::num_groups]), window)
        for window, layers in ordered
        for num_groups in (-(-len(layers) // size),)
        for first in range(num_groups)
    )


def _layers_per_group(numbers: Iterable[int]) -> int:
    """The number of slots of a block, from the number of layers of each kind."""
    counts = list(numbers)
    return max(counts) if max(counts) <= min(counts) * _NEARLY_EQUAL else min(counts)


def one_group(num_layers: int) -> tuple[KVCacheGroup, ...]:
    """The only group of a model whose layers all use one block table."""
    return (KVCacheGroup(tuple(range(num_layers))),)


def num_slots(groups: Iterable[KVCacheGroup]) -> int:
    """Layers whose KV one block holds."""
    return max(len(group.layers) for group in groups)


def num_window_blocks(groups: Iterable[KVCacheGroup], block_size: int) -> int:
    """Blocks before it that the first token of a block sees, over all groups with a window."""
    windows = (group.sliding_window for group in groups)
    return sum(-(-(window - 1) // block_size) for window in windows if window is not None)


def num_blocks_held(groups: Iterable[KVCacheGroup], block_size: int, num_blocks: int) -> int:
    """Blocks of the pool that a pin of so many blocks of tokens holds: of a group with a window its last."""
    windows = (group.sliding_window for group in groups)
    return sum(
        num_blocks if window is None else min(num_blocks, -(-(window - 1) // block_size))
        for window in windows
    )


def max_blocks_held(
    groups: Sequence[KVCacheGroup], block_size: int, num_tokens: int, step_tokens: int
) -> int:
    """Blocks of the pool that a context takes at most while it is computed, ``step_tokens`` at once."""
    num_blocks = -(-num_tokens // block_size)
    step_blocks = sum(not group.is_full for group in groups) * (-(-step_tokens // block_size) + 1)
    return min(num_blocks_held(groups, block_size, num_blocks) + step_blocks, num_blocks * len(groups))

"""The KV cache groups of a model: layers that need the same blocks of a sequence share a block table.

All groups of attention layers share one pool. A block has a slot for each layer of a group, so that any group
can use any block: groups have equally many layers, except for one that leaves its last slots unused.

Layers that keep a state of fixed size instead (linear attention, Mamba) are one group, the last. Their states
have a separate pool, and where memory is compared a state counts as blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd

import msgspec

_NEARLY_EQUAL = 1.25
"""If the largest kind of layer has at most this many times the layers of the smallest, unused slots cost less
than more groups do."""

_MANY = 1 << 60
"""More blocks than a sequence has."""


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers that share a block table, as their attention has the same pattern: a window, chunks, or neither.
    Or layers with states."""

    layers: tuple[int, ...]
    """The indices of the layers, those with states numbered apart. The layer at position i uses slot i of
    each block, or ``slots_each`` slots from ``slots_each`` * i on."""
    sliding_window: int | None = None
    """Tokens that a token sees, itself included, or None if it sees all tokens before it."""
    attention_chunk: int | None = None
    """Tokens of a chunk: a token sees itself and those before it in its chunk, the first of which begins with
    the sequence. None if there are no chunks."""
    state_blocks: int | None = None
    """Blocks that take as many bytes as one sequence's state of these layers; None: they are attention
    layers."""
    slots_each: int = 1
    """Slots of a block that a layer takes: more than one if other layers have smaller keys and values."""

    def __post_init__(self) -> None:
        assert self.sliding_window is None or self.attention_chunk is None

    @property
    def is_full(self) -> bool:
        """Whether a token sees all tokens before it."""
        return self.sliding_window is None and self.attention_chunk is None and self.state_blocks is None

    @property
    def kind(self) -> str:
        """V1's name for such a group in its events."""
        if self.is_state:
            return "mamba"
        if self.attention_chunk is not None:
            return "chunked_local_attention"
        return "full_attention" if self.sliding_window is None else "sliding_window"

    @property
    def is_state(self) -> bool:
        """Whether the layers keep a state of fixed size, and no KV."""
        return self.state_blocks is not None

    def num_skipped_tokens(self, position: int) -> int:
        """Number of first tokens that neither the token at ``position`` nor any later one sees."""
        if self.sliding_window is not None:
            return max(0, position - self.sliding_window + 1)
        return 0 if self.attention_chunk is None else position - position % self.attention_chunk

    def num_blocks_held(self, block_size: int, num_blocks: int) -> int:
        """How many of ``num_blocks`` blocks of tokens the tokens after them see."""
        return num_blocks - self.num_skipped_tokens(num_blocks * block_size) // block_size

    def max_blocks_held(self, block_size: int, num_blocks: int) -> int:
        """The maximum of ``num_blocks_held`` over all numbers of blocks up to this one."""
        if self.sliding_window is not None:
            return min(num_blocks, -(-(self.sliding_window - 1) // block_size))
        if self.attention_chunk is None:
            return num_blocks
        # A chunk may begin at any multiple of the divisor in its first block.
        divisor = gcd(self.attention_chunk, block_size)
        return min(num_blocks, (self.attention_chunk - 1 + block_size - divisor) // block_size)


ONE_FULL_GROUP = (KVCacheGroup(layers=(0,)),)
"""The groups of a model whose layers are all alike, where their number does not matter."""


def groups_of(
    windows: Sequence[int | None],
    chunks: Sequence[int | None] | None = None,
    slots: Sequence[int] | None = None,
) -> tuple[KVCacheGroup, ...]:
    """Group layers by their sliding window and their chunk, None where they have none; full attention comes
    first, then windows.

    The layers of one kind are assigned to its groups in turn, as in V1. ``chunks`` None: no layer has any.
    ``slots``: those that each layer takes; None: one.
    """
    num_layers = len(windows)
    kinds: dict[tuple[int | None, int | None, int], list[int]] = {}
    each = zip(windows, chunks or [None] * num_layers, slots or [1] * num_layers, strict=True)
    for layer, kind in enumerate(each):
        kinds.setdefault(kind, []).append(layer)
    size = _slots_per_block({kind: len(layers) * kind[2] for kind, layers in kinds.items()})
    ordered = sorted(kinds.items(), key=lambda kind: (kind[0][1] or 0, kind[0][0] or 0, kind[0][2]))
    return tuple(
        KVCacheGroup(tuple(layers[first::num_groups]), window, chunk, slots_each=slots_each)
        for (window, chunk, slots_each), layers in ordered
        for num_groups in (-(-len(layers) // (size // slots_each)),)
        for first in range(num_groups)
    )


def _slots_per_block(needed: Mapping[tuple[int | None, int | None, int], int]) -> int:
    """The number of slots of a block, from the slots that the layers of each kind take, so that the largest
    layers leave none unused."""
    counts = needed.values()
    wanted = max(counts) if max(counts) <= min(counts) * _NEARLY_EQUAL else min(counts)
    largest = max(slots_each for _, _, slots_each in needed)
    return -(-wanted // largest) * largest


def one_group(num_layers: int, slots_each: int = 1) -> tuple[KVCacheGroup, ...]:
    """The only group of a model whose layers all use one block table."""
    return (KVCacheGroup(tuple(range(num_layers)), slots_each=slots_each),)


def attention_groups(groups: Iterable[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """The groups that have block tables."""
    return tuple(group for group in groups if not group.is_state)


def blocks_per_state(groups: Iterable[KVCacheGroup]) -> int:
    """Blocks that a sequence's state counts as; 0 if the model has none."""
    return sum(group.state_blocks or 0 for group in groups)


def num_slots(groups: Iterable[KVCacheGroup]) -> int:
    """Layers whose KV one block holds, those with the smallest keys and values."""
    return max(len(group.layers) * group.slots_each for group in attention_groups(groups))


def num_window_blocks(groups: Iterable[KVCacheGroup], block_size: int) -> int:
    """The most blocks that the first token of a block sees before that block, over all groups with a window
    or chunks."""
    return sum(group.max_blocks_held(block_size, _MANY) for group in groups if not group.is_full)


def num_blocks_held(groups: Iterable[KVCacheGroup], block_size: int, num_blocks: int) -> int:
    """Blocks that a pin of ``num_blocks`` blocks of tokens counts as: what a return sees, and a state."""
    held = sum(group.num_blocks_held(block_size, num_blocks) for group in attention_groups(groups))
    return held + blocks_per_state(groups) if num_blocks else 0


def max_blocks_held(
    groups: Sequence[KVCacheGroup], block_size: int, num_tokens: int, step_tokens: int
) -> int:
    """The most blocks of the pool that a context takes while it is computed, ``step_tokens`` at a time: a
    group with a window or chunks holds what the first of these sees, and what they write."""
    groups = attention_groups(groups)
    num_blocks = -(-num_tokens // block_size)
    written = -(-step_tokens // block_size) + 1
    return sum(
        num_blocks
        if group.is_full
        else min(num_blocks, group.max_blocks_held(block_size, num_blocks) + written)
        for group in groups
    )

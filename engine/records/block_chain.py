"""A compact chain of block hashes, which recognizes the prompts that continue it."""

from __future__ import annotations

from collections.abc import Sequence

HEAD_BYTES = 8
"""Bytes kept of each hash in a chain that is used for comparison only."""


class BlockChain:
    """A compact hash chain that recognizes what continues it: 8 bytes per block.

    That is enough to distinguish prefixes, and correctness does not depend on it: KV is looked up by the full
    hash.
    """

    __slots__ = ("_heads",)

    def __init__(self, block_hashes: Sequence[bytes], before: BlockChain | None = None) -> None:
        """``before`` is a chain that this one probably continues: the shared part is copied."""
        num_shared = 0 if before is None else before.num_shared(block_hashes)
        shared = b"" if before is None else before._heads[: num_shared * HEAD_BYTES]
        self._heads: bytes = shared + b"".join([each[:HEAD_BYTES] for each in block_hashes[num_shared:]])

    def __len__(self) -> int:
        return len(self._heads) // HEAD_BYTES

    def heads(self, first: int = 0) -> bytes:
        """The beginnings of the hashes from block ``first`` on, for ``followed_by``."""
        return self._heads[first * HEAD_BYTES :]

    def followed_by(self, heads: bytes) -> BlockChain:
        """This chain, continued by beginnings of hashes."""
        longer = BlockChain(())
        longer._heads = self._heads + heads
        return longer

    def num_shared(self, block_hashes: Sequence[bytes]) -> int:
        """Length of the common prefix with another chain. Each hash covers all blocks before it, so one equal
        hash means that all before it are equal."""
        low = 0
        high = min(len(self), len(block_hashes))
        while low < high:
            middle = (low + high + 1) // 2
            start = (middle - 1) * HEAD_BYTES
            if self._heads[start : start + HEAD_BYTES] == block_hashes[middle - 1][:HEAD_BYTES]:
                low = middle
            else:
                high = middle - 1
        return low

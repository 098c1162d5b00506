"""Finds the longest prefix of a prompt in the folder that servers share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request
from engine.kv_transfer.saved_blocks import SavedBlocks
from engine.records.kv_transfer import SavedPrefix


class SavedPrefixes:
    """Looks in the folder once per request, on its arrival: the scheduler itself sees no files."""

    def __init__(
        self, folder: Path, block_size: int, name_of: Callable[[BlockHash], bytes], *, must_load: bool
    ) -> None:
        """``folder``: of the first rank. ``block_size`` in tokens. ``name_of``: the name of a block there.
        ``must_load``: requests whose load fails end with an error."""
        self.saved = SavedBlocks(folder)
        self._block_size = block_size
        self._name_of = name_of
        self._must_load = must_load

    def use(self, folder: Path) -> None:
        """Look in another folder from now on: other weights have been loaded."""
        self.saved = SavedBlocks(folder)

    def find(self, request: Request) -> SavedPrefix | None:
        """The prefix whose last block is there. A block before it may be gone: then the load fails.

        Blocks are saved and used from the first on, so thousands of blocks take a dozen look-ups.
        """
        hashes = request.block_hashes[: (request.num_tokens - 1) // self._block_size]
        low = 0
        high = len(hashes)
        while low < high:
            middle = (low + high) // 2
            if self.saved.has(self._name_of(hashes[middle])):
                low = middle + 1
            else:
                high = middle
        return SavedPrefix(low * self._block_size, self._must_load) if low else None

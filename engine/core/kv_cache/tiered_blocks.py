"""The blocks that move between the pool and another tier: what a load brings of each KV cache group, and what
is worth a copy. Which copies there are is not known here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_pool import TO_LOAD, BlockPool, KVCacheBlock
from engine.core.kv_cache.kv_cache_coordinator import KVCacheCoordinator
from engine.core.request import Request


@dataclass(frozen=True, slots=True)
class LoadablePrefix:
    """A prefix of a request of which the pool and another tier together have what each group needs."""

    num_tokens: int
    table: list[KVCacheBlock]
    """As that of a hit, but ``TO_LOAD`` for what only the other tier has."""
    keys: list[BlockHash]
    """Names of the blocks to load, in the table's order."""


class TieredBlocks:
    """Finds prefixes that can be loaded, and holds the blocks of loads until these have ended."""

    def __init__(
        self, pool: BlockPool, coordinator: KVCacheCoordinator, *, is_unitary: bool, max_step_tokens: int
    ) -> None:
        """``max_step_tokens``: the most tokens of one request that are computed before its windows move."""
        self._pool = pool
        self._coordinator = coordinator
        self._is_unitary = is_unitary
        self._max_step_tokens = max_step_tokens
        self._loads: dict[int, list[KVCacheBlock]] = {}
        self.copies: Container[BlockHash] = ()
        """Names of the blocks that other tiers have."""

    def __len__(self) -> int:
        return len(self._loads)

    def held(self) -> Iterable[list[KVCacheBlock]]:
        """The blocks of each load."""
        return self._loads.values()

    # ---- loads ----

    def find(self, request: Request, copies: Container[BlockHash]) -> LoadablePrefix:
        """The longest prefix that need not be computed if blocks are loaded from these copies.

        The last token is never among it.
        """
        coordinator, hashes = self._coordinator, request.block_hashes
        table = coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1, copies)
        num_blocks = len(table) // coordinator.num_groups
        if TO_LOAD in table:
            names = zip(coordinator.keys_of(hashes[:num_blocks]), table, strict=True)
            keys = [key for key, block in names if block is TO_LOAD]
        else:
            keys = []
        return LoadablePrefix(num_blocks * coordinator.block_size, table, keys)

    def num_reserved(self, request: Request, num_loaded_tokens: int) -> int:
        """For how many of its tokens a request has blocks that waits for a load: for all, so that it cannot
        get stuck; where blocks of groups come back, for as many as its first step computes."""
        if self._is_unitary:
            return request.num_tokens
        return min(request.num_tokens, num_loaded_tokens + self._max_step_tokens)

    def begin_load(
        self, load_id: int, request: Request, prefix: LoadablePrefix, max_tokens: int
    ) -> list[int]:
        """Allocate the blocks of a waiting request, which fits; returns the ids of those to load.

        These are the load's, too. None of them is cached before ``cache_loaded``.
        """
        assert load_id not in self._loads
        table, coordinator, pool = prefix.table, self._coordinator, self._pool
        null = pool.null_block
        pool.touch(block for block in table if block is not TO_LOAD and block is not null)
        loaded = pool.get_new_blocks(len(prefix.keys))
        following = iter(loaded)
        num_cached = table.index(TO_LOAD) // coordinator.num_groups
        full_table = [next(following) if block is TO_LOAD else block for block in table]
        coordinator.adopt(request.request_id, full_table, num_cached)
        self.expect_branches(request)
        num_tokens = self.num_reserved(request, prefix.num_tokens)
        coordinator.allocate_new_blocks(request.request_id, min(num_tokens, max_tokens))
        self._loads[load_id] = loaded
        pool.touch(loaded)
        return [block.block_id for block in loaded]

    def cache_loaded(self, load_id: int, request: Request, prefix: LoadablePrefix) -> None:
        """Cache the blocks of a load that has ended well, and whose request waits for it."""
        loaded = self._loads[load_id]
        self._pool.cache_full_blocks(loaded, prefix.keys, 0, len(loaded))
        num_blocks = prefix.num_tokens // self._coordinator.block_size
        self._coordinator.note_cached(request.request_id, num_blocks)

    def end_load(self, load_id: int) -> None:
        """Release the blocks of a load, which writes them no more."""
        self._pool.free_blocks(reversed(self._loads.pop(load_id)))

    # ---- what other tiers should have ----

    def expect_branches(self, request: Request) -> None:
        """Note where others may leave the sequence of a request that has just got its hit."""
        if self._coordinator.has_windows:
            self._coordinator.expect_branches(
                request.request_id, request.block_hashes, request.num_prompt_tokens, self.copies
            )

    def worth_storing(self, request: Request, start: int, end: int) -> tuple[Sequence[BlockHash], list[int]]:
        """Names and ids of blocks to copy of the request's full blocks [start, end), all computed."""
        return self._coordinator.worth_storing(request.request_id, request.block_hashes, start, end)

    def passed(self, request: Request, start: int, end: int) -> list[BlockHash]:
        """Names of the blocks that the request's windows leave when it has computed ``end`` blocks and not
        only ``start``: nobody is expected to ask for their copies."""
        return self._coordinator.passed(request.request_id, request.block_hashes, start, end)

    def names_of_hit(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Names of the blocks that a hit of all of these has."""
        return self._coordinator.names_of_hit(block_hashes)

    def names_of(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Names of these blocks in every group."""
        return self._coordinator.keys_of(block_hashes)

"""Moves blocks between the pool and another tier: what a load brings of each KV cache group, and what is
worth copying. This module does not know which copies there are.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_pool import TO_LOAD, BlockPool, KVCacheBlock
from engine.core.kv_cache.kv_cache_coordinator import KVCacheCoordinator
from engine.core.kv_cache.state_manager import StateManager
from engine.core.request import Request
from engine.records.kv_transfer import PrefixSource


@dataclass(frozen=True, slots=True)
class LoadablePrefix:
    """A prefix of a request of which the pool and another tier together have what each group needs."""

    num_tokens: int
    table: list[KVCacheBlock]
    """The table of a hit, with ``TO_LOAD`` for what only the other tier has."""
    keys: list[BlockHash]
    """Names of the blocks to load, in the table's order, followed by those of a state."""
    loads_state: bool = False
    """Whether the state at its end is to be loaded; else the pool has it, or no layer has states."""
    source: PrefixSource | None = None
    """The other server or the folder that has it; None: this engine's tier."""


class TieredBlocks:
    """Finds prefixes that can be loaded, and holds the blocks of loads until these have ended."""

    def __init__(
        self,
        pool: BlockPool,
        coordinator: KVCacheCoordinator,
        states: StateManager | None,
        max_step_tokens: int,
    ) -> None:
        """``max_step_tokens``: the most tokens of one request that are computed before its windows move."""
        self._pool = pool
        self._coordinator = coordinator
        self._states = states
        self._is_unitary = coordinator.num_groups == 1 and not coordinator.has_windows and states is None
        self._max_step_tokens = max_step_tokens
        self._loads: dict[int, list[KVCacheBlock]] = {}
        self.copies: Container[BlockHash] = ()
        """Names of the blocks that other tiers have."""

    def __len__(self) -> int:
        return len(self._loads)

    def held(self) -> Iterable[list[KVCacheBlock]]:
        """The blocks of each load."""
        return self._loads.values()

    def join(self, copies: Container[BlockHash], *, keeps_blocks: bool) -> None:
        """Take the names of blocks that other tiers have at any time; they may want evicted states, too."""
        self.copies = copies
        if self._states is not None:
            self._states.notes_evicted = keeps_blocks

    def names_of_prefix(self, block_hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Names of the blocks in a hit of all these hashes, including those of the state at its end."""
        names = list(self._coordinator.names_of_hit(block_hashes))
        if self._states is not None and block_hashes:
            names += self._states.layout.names_of(block_hashes[-1])
        return names

    # ---- loads ----

    def find(self, request: Request, copies: Container[BlockHash]) -> LoadablePrefix:
        """The longest prefix that need not be computed if blocks are loaded from these copies.

        The last token is never part of it.
        """
        coordinator = self._coordinator
        hashes = request.block_hashes
        table = coordinator.find_longest_cache_hit(hashes, request.num_tokens - 1, copies)
        if self._states is not None:
            return self._with_state(self._states, hashes, table, copies)
        num_tokens = len(table) // coordinator.num_groups * coordinator.block_size
        return LoadablePrefix(num_tokens, table, self._keys_to_load(hashes, table))

    def _with_state(
        self,
        states: StateManager,
        hashes: Sequence[BlockHash],
        table: list[KVCacheBlock],
        copies: Container[BlockHash],
    ) -> LoadablePrefix:
        """The longest prefix within this table that has a state at its end."""
        coordinator = self._coordinator
        while True:
            num_blocks = len(table) // coordinator.num_groups
            num_hit = states.longest_hit(hashes, num_blocks, copies)
            if num_hit == num_blocks:
                break
            table = coordinator.find_longest_cache_hit(hashes, num_hit * coordinator.block_size, copies)
        keys = self._keys_to_load(hashes, table)
        loads_state = num_blocks > 0 and states.pool.get_cached_block(hashes[num_blocks - 1]) is None
        if loads_state:
            keys += states.layout.names_of(hashes[num_blocks - 1])
        return LoadablePrefix(num_blocks * coordinator.block_size, table, keys, loads_state)

    def _keys_to_load(self, hashes: Sequence[BlockHash], table: list[KVCacheBlock]) -> list[BlockHash]:
        """Names of the blocks in a table that only another tier has."""
        if TO_LOAD not in table:
            return []
        num_blocks = len(table) // self._coordinator.num_groups
        names = zip(self._coordinator.keys_of(hashes[:num_blocks]), table, strict=True)
        return [key for key, block in names if block is TO_LOAD]

    def num_reserved(self, request: Request, num_loaded_tokens: int) -> int:
        """The number of tokens for which a request that waits for a load has blocks: all, so that it cannot
        get stuck; where groups have windows or states, those that its first step computes."""
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
        table = prefix.table
        coordinator = self._coordinator
        pool = self._pool
        null = pool.null_block
        pool.touch(block for block in table if block is not TO_LOAD and block is not null)
        loaded = pool.get_new_blocks(table.count(TO_LOAD))
        following = iter(loaded)
        num_cached = (table.index(TO_LOAD) if loaded else len(table)) // coordinator.num_groups
        full_table = [next(following) if block is TO_LOAD else block for block in table]
        coordinator.adopt(request.request_id, full_table, num_cached)
        self.expect_branches(request)
        num_tokens = self.num_reserved(request, prefix.num_tokens)
        coordinator.allocate_new_blocks(request.request_id, min(num_tokens, max_tokens))
        self._loads[load_id] = loaded
        pool.touch(loaded)
        block_ids = [block.block_id for block in loaded]
        if self._states is not None:
            block_ids += self._begin_state(self._states, load_id, request, prefix)
        return block_ids

    def _begin_state(
        self, states: StateManager, load_id: int, request: Request, prefix: LoadablePrefix
    ) -> Iterable[int]:
        """Allocate the state slots of a request; returns the ids of the blocks to load of a state."""
        coordinator = self._coordinator
        num_blocks = prefix.num_tokens // self._coordinator.block_size
        cached = coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        num_shared = max(num_blocks, len(cached) // coordinator.num_groups)
        if prefix.loads_state:
            return states.begin_load(load_id, request, num_blocks, num_shared)
        states.start(request, num_blocks, num_shared)
        return ()

    def cache_loaded(self, load_id: int, request: Request, prefix: LoadablePrefix) -> None:
        """Cache the blocks of a load that has ended well, and whose request waits for it."""
        loaded = self._loads[load_id]
        num_blocks = prefix.num_tokens // self._coordinator.block_size
        if self._pool.recorder is not None:
            self._pool.recorder.begin(request.request_id, 0, num_blocks)
        self._pool.cache_full_blocks(loaded, prefix.keys, 0, len(loaded))
        self._coordinator.note_cached(request.request_id, num_blocks)
        if self._states is not None:
            self._states.cache_loaded(load_id, request, num_blocks)

    def end_load(self, load_id: int) -> None:
        """Release the blocks of a load that has ended."""
        self._pool.free_blocks(reversed(self._loads.pop(load_id)))
        if self._states is not None:
            self._states.end_load(load_id)

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

    def computed(self, request: Request, start: int, end: int) -> tuple[Sequence[BlockHash], list[int]]:
        """Names and ids of all blocks that the request holds of its full blocks [start, end)."""
        return self._coordinator.computed_blocks(request.request_id, request.block_hashes, start, end)

    def passed(self, request: Request, start: int, end: int) -> list[BlockHash]:
        """Names of the blocks that the request's windows leave while it computes from block ``start`` to
        ``end``: no request is expected to need their copies."""
        return self._coordinator.passed(request.request_id, request.block_hashes, start, end)

    def names_of_hit(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Names of the blocks in a hit of all these hashes."""
        return self._coordinator.names_of_hit(block_hashes)

    def names_of(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Names of these blocks in every group, and of the states at their ends that other tiers have."""
        names = self._coordinator.keys_of(block_hashes)
        if self._states is None:
            return names
        layout = self._states.layout
        kept = (h for h in block_hashes if layout.begins_among(h, self.copies))
        return [*names, *(name for h in kept for name in layout.names_of(h))]

    def all_names_of(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Names of these blocks in every group, and of all states at their ends, even those that no other
        tier has."""
        names = self._coordinator.keys_of(block_hashes)
        if self._states is None:
            return names
        layout = self._states.layout
        return [*names, *(name for h in block_hashes for name in layout.names_of(h))]

    def evicted_states(self) -> Iterable[tuple[list[BlockHash], range]]:
        """Names and ids of the blocks of states that the pool evicts now and other tiers should have.

        Excludes those that have a copy, and those whose KV no tier has: they could not be hit.
        """
        if self._states is None:
            return
        layout = self._states.layout
        pool = self._states.pool
        for block_hash, slot in self._states.take_evicted():
            if pool.get_cached_block(block_hash) is not None or layout.is_among(block_hash, self.copies):
                continue
            key = self._coordinator.key_of_full(block_hash)
            if key is None or key in self.copies or self._pool.get_cached_block(key) is not None:
                yield layout.names_of(block_hash), layout.blocks_of(slot)

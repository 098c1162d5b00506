"""Tracks which blocks belong to which request, with one interface for all models.

A model with full attention only has one group of layers and one block table per request. A model that also
has layers with sliding windows or chunks has a table per group, all of the same length, and a hit is what all
groups have. The scheduler and the worker see the tables of a request as one list, ordered by block of tokens
and within it by group.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import chain
from typing import Protocol

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from engine.core.kv_cache.single_type_kv_cache_manager import (
    FullAttentionManager,
    LocalAttentionManager,
    make_manager,
)
from engine.core.kv_cache.unitary_kv_cache_coordinator import UnitaryKVCacheCoordinator
from engine.records.kv_cache_groups import KVCacheGroup


class KVCacheCoordinator(Protocol):
    """What the KVCacheManager needs to know about the blocks of each request."""

    block_size: int
    num_groups: int
    """Number of KV cache groups: each block of tokens has one block for each."""
    has_windows: bool
    """Whether any group needs less than all blocks."""

    def blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        """The request's block table, first to last, null blocks included; empty if it has none."""

    def held_by(self, request_id: str) -> list[KVCacheBlock]:
        """The blocks that the request holds, first to last."""

    def has_blocks_for(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request already has blocks for ``num_tokens`` tokens."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int, copies: Container[BlockHash] = ()
    ) -> list[KVCacheBlock]:
        """Cached blocks that cover a prefix of at most ``max_tokens`` tokens, as a block table.

        ``copies``: names of blocks that another tier has; ``TO_LOAD`` stands for those that are not cached.
        """

    def num_blocks_to_allocate(self, request_id: str, num_tokens: int, hit: Sequence[KVCacheBlock]) -> int:
        """Free blocks that the request takes to have ``num_tokens``, including free blocks of a hit."""

    def add_hit(self, request_id: str, hit: Sequence[KVCacheBlock]) -> None:
        """Give a request without blocks the cached ones that it hit."""

    def adopt(self, request_id: str, table: Sequence[KVCacheBlock], num_cached: int) -> None:
        """Give a request without blocks this table, whose blocks are already held for it.

        ``num_cached``: how many blocks of its tokens, from the first on, are cached.
        """

    def note_cached(self, request_id: str, num_blocks: int) -> None:
        """Note that the first ``num_blocks`` blocks of the request's tokens are cached, or need not be."""

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Allocate blocks until the request has enough for ``num_tokens``, and return the new ones."""

    def cache_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Cache the full blocks of the first ``num_tokens`` tokens."""

    def uncache_blocks(self, request_id: str, num_tokens: int) -> None:
        """Evict what ``cache_blocks`` has cached beyond the first ``num_tokens`` tokens."""

    def evict_blocks(self, request_id: str) -> None:
        """Evict the request's blocks from the prefix cache, even if others hold them."""

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the blocks that have left their windows.

        A turn that continues after the last full block of the computed tokens needs none of them.
        """

    def expect_branches(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        num_prompt_tokens: int,
        copies: Container[BlockHash],
    ) -> None:
        """Note where others may leave the sequence of a request that has just got its hit.

        ``copies``: names of blocks that another tier has.
        """

    def worth_storing(
        self, request_id: str, block_hashes: Sequence[BlockHash], start: int, end: int
    ) -> tuple[Sequence[BlockHash], list[int]]:
        """Names and ids of the request's blocks [start, end) of tokens that another tier should have. All
        blocks before ``end`` are computed."""

    def computed_blocks(
        self, request_id: str, block_hashes: Sequence[BlockHash], start: int, end: int
    ) -> tuple[Sequence[BlockHash], list[int]]:
        """Names and ids of all blocks that the request holds for its blocks [start, end) of tokens."""

    def passed(
        self, request_id: str, block_hashes: Sequence[BlockHash], start: int, end: int
    ) -> list[BlockHash]:
        """Names of the blocks needed to continue after block ``start`` of tokens, but not after ``end``."""

    def names_of_hit(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Names of the blocks in a hit of all these hashes."""

    def take(self, request_id: str) -> list[KVCacheBlock]:
        """Remove a request; returns the blocks that it held, first to last."""

    def take_prefix(self, request_id: str, num_blocks: int) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        """Remove a request; returns the blocks in a hit of its first ``num_blocks`` blocks, and the others
        that it held."""

    def num_skipped_blocks(self, num_blocks: int) -> int:
        """Number of null blocks, over all groups, in the table of a hit of ``num_blocks`` blocks."""

    def keys_of(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """The names under which the pool caches these blocks."""

    def key_of_full(self, block_hash: BlockHash) -> BlockHash | None:
        """The name of a block that every longer hit must have; None if there is no full attention."""


class KVCacheCoordinatorNoPrefixCache:
    """Tracks any number of groups, none of which is cached."""

    def __init__(
        self, pool: BlockPool, block_size: int, groups: Sequence[KVCacheGroup], max_step_tokens: int
    ) -> None:
        self.block_size = block_size
        self.num_groups = len(groups)
        self.single_type_managers = tuple(
            make_manager(pool, block_size, group_id, group, max_step_tokens)
            for group_id, group in enumerate(groups)
        )
        self._windowed = [m for m in self.single_type_managers if isinstance(m, LocalAttentionManager)]
        self._full = [m for m in self.single_type_managers if isinstance(m, FullAttentionManager)]
        self._first = self.single_type_managers[0]
        self._null = pool.null_block
        self.has_windows = bool(self._windowed)

    def blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        return _in_one_list([m.req_to_blocks.get(request_id, []) for m in self.single_type_managers])

    def held_by(self, request_id: str) -> list[KVCacheBlock]:
        return self._without_null(self.blocks_of(request_id))

    def has_blocks_for(self, request_id: str, num_tokens: int) -> bool:
        table = self._first.req_to_blocks.get(request_id)
        return table is not None and num_tokens <= len(table) * self.block_size

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int, copies: Container[BlockHash] = ()
    ) -> list[KVCacheBlock]:
        return []

    def num_blocks_to_allocate(self, request_id: str, num_tokens: int, hit: Sequence[KVCacheBlock]) -> int:
        return sum(
            manager.num_blocks_to_allocate(request_id, num_tokens, part)
            for manager, part in zip(self.single_type_managers, self._parts(hit), strict=True)
        )

    def add_hit(self, request_id: str, hit: Sequence[KVCacheBlock]) -> None:
        for manager, part in zip(self.single_type_managers, self._parts(hit), strict=True):
            manager.add_hit(request_id, part)

    def adopt(self, request_id: str, table: Sequence[KVCacheBlock], num_cached: int) -> None:
        for manager, part in zip(self.single_type_managers, self._parts(table), strict=True):
            manager.adopt(request_id, part, num_cached)

    def note_cached(self, request_id: str, num_blocks: int) -> None:
        for manager in self.single_type_managers:
            manager.num_cached_block[request_id] = num_blocks

    def worth_storing(
        self, request_id: str, block_hashes: Sequence[BlockHash], start: int, end: int
    ) -> tuple[Sequence[BlockHash], list[int]]:
        managers = self.single_type_managers
        return self._held(
            request_id, block_hashes, [(m, m.to_store(request_id, start, end)) for m in managers]
        )

    def computed_blocks(
        self, request_id: str, block_hashes: Sequence[BlockHash], start: int, end: int
    ) -> tuple[Sequence[BlockHash], list[int]]:
        blocks = range(start, end)
        return self._held(request_id, block_hashes, [(m, blocks) for m in self.single_type_managers])

    def _held(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        wanted: Iterable[tuple[FullAttentionManager | LocalAttentionManager, Iterable[int]]],
    ) -> tuple[Sequence[BlockHash], list[int]]:
        """Names and ids of the request's blocks at these indices, group by group, without null blocks."""
        keys = list[BlockHash]()
        block_ids = list[int]()
        for manager, indices in wanted:
            table = manager.req_to_blocks[request_id]
            for index in indices:
                if table[index] is not self._null:
                    keys.append(manager.key_of(block_hashes[index]))
                    block_ids.append(table[index].block_id)
        return keys, block_ids

    def passed(
        self, request_id: str, block_hashes: Sequence[BlockHash], start: int, end: int
    ) -> list[BlockHash]:
        return [
            manager.key_of(block_hashes[index])
            for manager in self._windowed
            for index in manager.left_behind(request_id, start, end)
        ]

    def names_of_hit(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        num_blocks = len(block_hashes)
        managers = [(m, m.num_skipped_blocks(num_blocks)) for m in self.single_type_managers]
        return [
            manager.key_of(block_hash)
            for index, block_hash in enumerate(block_hashes)
            for manager, num_skipped in managers
            if index >= num_skipped
        ]

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        return _in_one_list(
            [m.allocate_new_blocks(request_id, num_tokens) for m in self.single_type_managers]
        )

    def cache_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        if num_tokens // self.block_size > self._first.num_cached_block[request_id]:
            for manager in self.single_type_managers:
                manager.cache_blocks(request_id, block_hashes, num_tokens)

    def uncache_blocks(self, request_id: str, num_tokens: int) -> None:
        for manager in self.single_type_managers:
            manager.uncache_blocks(request_id, num_tokens)

    def evict_blocks(self, request_id: str) -> None:
        for manager in self.single_type_managers:
            manager.evict_blocks(request_id)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        num_aligned = num_computed_tokens // self.block_size * self.block_size
        for manager in self._windowed:
            manager.remove_skipped_blocks(request_id, num_aligned)

    def expect_branches(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        num_prompt_tokens: int,
        copies: Container[BlockHash],
    ) -> None:
        pass

    def take(self, request_id: str) -> list[KVCacheBlock]:
        return self._without_null(_in_one_list(self._take_tables(request_id)))

    def take_prefix(self, request_id: str, num_blocks: int) -> tuple[list[KVCacheBlock], list[KVCacheBlock]]:
        assert num_blocks <= self._first.num_cached_block.get(request_id, 0), "only cached blocks are kept"
        null = self._null
        kept = list[list[KVCacheBlock]]()
        others = list[list[KVCacheBlock]]()
        for manager, table in zip(self.single_type_managers, self._take_tables(request_id), strict=True):
            start = manager.num_skipped_blocks(num_blocks)
            kept.append([null] * start + table[start:num_blocks])
            others.append(table[:start] + [null] * (num_blocks - start) + table[num_blocks:])
        held = self._without_null(_in_one_list(kept))
        skipped = self.num_skipped_blocks(num_blocks)
        assert len(held) == num_blocks * self.num_groups - skipped, "a window was freed too early"
        return held, self._without_null(_in_one_list(others))

    def num_skipped_blocks(self, num_blocks: int) -> int:
        return sum(manager.num_skipped_blocks(num_blocks) for manager in self._windowed)

    def keys_of(self, block_hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return list(
            chain.from_iterable(
                zip(*(m.keys_of(block_hashes) for m in self.single_type_managers), strict=True)
            )
        )

    def key_of_full(self, block_hash: BlockHash) -> BlockHash | None:
        return self._full[0].key_of(block_hash) if self._full else None

    def _take_tables(self, request_id: str) -> list[list[KVCacheBlock]]:
        for windowed in self._windowed:
            windowed.forget(request_id)
        for manager in self.single_type_managers:
            manager.num_cached_block.pop(request_id, None)
        return [m.req_to_blocks.pop(request_id, []) for m in self.single_type_managers]

    def _parts(self, blocks: Sequence[KVCacheBlock]) -> list[Sequence[KVCacheBlock]]:
        """Split a part of a table by group."""
        return [blocks[group :: self.num_groups] for group in range(self.num_groups)]

    def _without_null(self, blocks: Iterable[KVCacheBlock]) -> list[KVCacheBlock]:
        null = self._null
        return [block for block in blocks if block is not null]


class HybridKVCacheCoordinator(KVCacheCoordinatorNoPrefixCache):
    """Tracks several groups, or one with a window, whose blocks are cached by hash and group."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int, copies: Container[BlockHash] = ()
    ) -> list[KVCacheBlock]:
        """The longest prefix of which every group has what it needs.

        If a group's hit is shorter, the others search again, until all agree. Each prefix of a full-attention
        hit is a hit, so only groups with windows search more than once.
        """
        size = self.block_size
        length = min(max_tokens // size, len(block_hashes))
        found: dict[int, list[KVCacheBlock]] = {}
        for group, manager in enumerate(self.single_type_managers):
            if isinstance(manager, FullAttentionManager):
                found[group] = manager.find_longest_cache_hit(block_hashes, length * size, copies)
                length = len(found[group])
        is_agreed = False
        while not is_agreed and length:
            is_agreed = True
            for group, manager in enumerate(self.single_type_managers):
                if isinstance(manager, FullAttentionManager):
                    continue
                found[group] = manager.find_longest_cache_hit(block_hashes, length * size, copies)
                is_agreed &= len(found[group]) == length
                length = len(found[group])
        return _in_one_list([found[group][:length] for group in range(self.num_groups)]) if length else []

    def expect_branches(
        self,
        request_id: str,
        block_hashes: Sequence[BlockHash],
        num_prompt_tokens: int,
        copies: Container[BlockHash],
    ) -> None:
        """Note the ends of the hit, of a longer hit of full attention alone, and of the prompt.

        So the window before a common prefix's end is cached from the second time on that it is computed.
        """
        hit_end = shared_end = len(self._first.req_to_blocks[request_id])
        if self._full and self._windowed:
            rest = block_hashes[hit_end : (num_prompt_tokens - 1) // self.block_size]
            full = self._full[0].find_longest_cache_hit(rest, len(rest) * self.block_size, copies)
            shared_end += len(full)
        ends = (hit_end, shared_end, num_prompt_tokens // self.block_size)
        for manager in self._windowed:
            manager.expect_branches(request_id, ends)


def get_kv_cache_coordinator(
    pool: BlockPool,
    block_size: int,
    groups: Sequence[KVCacheGroup],
    *,
    enable_caching: bool,
    max_step_tokens: int,
) -> KVCacheCoordinator:
    """The coordinator of a model with these groups.

    ``max_step_tokens``: the most tokens of one request that are computed before its windows move on.
    """
    if not enable_caching:
        return KVCacheCoordinatorNoPrefixCache(pool, block_size, groups, max_step_tokens)
    if len(groups) == 1 and groups[0].is_full:
        return UnitaryKVCacheCoordinator(pool, block_size)
    return HybridKVCacheCoordinator(pool, block_size, groups, max_step_tokens)


def _in_one_list(tables: Sequence[Sequence[KVCacheBlock]]) -> list[KVCacheBlock]:
    """Blocks of equally long tables, by position and within it by group."""
    return list(chain.from_iterable(zip(*tables, strict=True)))

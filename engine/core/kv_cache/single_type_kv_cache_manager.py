"""Manages the blocks of one KV cache group: a block table per request, and which blocks its attention needs.

A group whose layers have a window or chunks needs only the last blocks of a sequence. Its tables have the
null block in place of every block that it does not need: skipped by a hit, or freed as the window moved.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import chain

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_pool import TO_LOAD, BlockPool, KVCacheBlock
from engine.records.kv_cache_groups import KVCacheGroup, num_window_blocks


class SingleTypeKVCacheManager:
    """What all groups have in common: block i of a request is for its tokens [i*size, (i+1)*size)."""

    def __init__(self, pool: BlockPool, block_size: int, group_id: int | None = None) -> None:
        """``group_id`` is None for a model's only group, whose blocks are named by their hash alone."""
        self.block_size = block_size
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[str, int] = {}
        """The number of leading blocks of each request that are cached, or need not be."""
        self._pool = pool
        self._key_end = b"" if group_id is None else group_id.to_bytes(2, "big")

    # ---- what its attention needs ----

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, copies: Container[BlockHash] = ()
    ) -> list[KVCacheBlock]:
        """Cached blocks that cover a prefix of at most ``max_length`` tokens, which need not be computed.

        ``copies``: names of blocks that another tier has; ``TO_LOAD`` stands for those that are not cached.
        """
        raise NotImplementedError

    def to_store(self, request_id: str, start: int, end: int) -> Iterable[int]:
        """Indices of the request's computed blocks [start, end) that another tier should have, when all
        before ``end`` are computed."""
        return range(start, end)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Number of first tokens that no token after ``num_computed_tokens`` sees."""
        return 0

    def num_skipped_blocks(self, num_blocks: int) -> int:
        """Number of first blocks that are not needed to continue after ``num_blocks`` blocks."""
        return self.get_num_skipped_tokens(num_blocks * self.block_size) // self.block_size

    # ---- names of blocks in the pool ----

    def keys_of(self, block_hashes: Sequence[BlockHash]) -> Iterable[BlockHash]:
        """The names under which the pool caches blocks of this group."""
        end = self._key_end
        return (block_hash + end for block_hash in block_hashes) if end else block_hashes

    def key_of(self, block_hash: BlockHash) -> BlockHash:
        """The name under which the pool caches a block of this group."""
        return block_hash + self._key_end

    # ---- block tables ----

    def num_blocks_to_allocate(self, request_id: str, num_tokens: int, hit: Sequence[KVCacheBlock]) -> int:
        """Free blocks that the request takes to have ``num_tokens``, including free blocks of a hit."""
        num_needed = (
            -(-num_tokens // self.block_size) - len(self.req_to_blocks.get(request_id, ())) - len(hit)
        )
        # Blocks of a hit without holders leave the free list, too.
        return max(num_needed, 0) + [block.ref_cnt for block in hit].count(0)

    def add_hit(self, request_id: str, hit: Sequence[KVCacheBlock]) -> None:
        """Give a request without blocks the cached ones that it hit."""
        self._pool.touch(hit)
        self.adopt(request_id, hit, len(hit))

    def adopt(self, request_id: str, table: Sequence[KVCacheBlock], num_cached: int) -> None:
        """Give a request without blocks these, which are already held for it."""
        assert request_id not in self.req_to_blocks, "only a request without blocks can hit the cache"
        self.req_to_blocks[request_id] = list(table)
        self.num_cached_block[request_id] = num_cached

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Allocate blocks until the request has enough for ``num_tokens``, and return the new ones."""
        table = self.req_to_blocks[request_id]
        num_new = -(-num_tokens // self.block_size) - len(table)
        if num_new <= 0:
            return []
        blocks = self._pool.get_new_blocks(num_new)
        table.extend(blocks)
        return blocks

    def cache_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Cache the full blocks of the first ``num_tokens`` tokens."""
        start = self.num_cached_block[request_id]
        end = num_tokens // self.block_size
        if end > start:
            if self._pool.recorder is not None:
                self._pool.recorder.begin(request_id, start, end)
            self._cache(self.req_to_blocks[request_id], block_hashes, start, end)
            self.num_cached_block[request_id] = end

    def _cache(
        self, table: list[KVCacheBlock], block_hashes: Sequence[BlockHash], start: int, end: int
    ) -> None:
        if not self._key_end:
            self._pool.cache_full_blocks(table, block_hashes, start, end)
            return
        null = self._pool.null_block
        named = zip(table[start:end], self.keys_of(block_hashes[start:end]), strict=True)
        needed = [(block, key) for block, key in named if block is not null]
        self._pool.cache_full_blocks([b for b, _ in needed], [key for _, key in needed], 0, len(needed))

    def uncache_blocks(self, request_id: str, num_tokens: int) -> None:
        """Evict what ``cache_blocks`` has cached beyond the first ``num_tokens`` tokens."""
        start = num_tokens // self.block_size
        self._evict(self.req_to_blocks[request_id][start : self.num_cached_block[request_id]])
        self.num_cached_block[request_id] = min(start, self.num_cached_block[request_id])

    def evict_blocks(self, request_id: str) -> None:
        """Evict the request's blocks from the prefix cache, even if others hold them."""
        self._evict(self.req_to_blocks.get(request_id, ()))

    def _evict(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            if block.block_hash is not None:  # else another holder has evicted it
                self._pool.evict(block)

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the request's blocks that no token after ``num_computed_tokens`` sees."""


class FullAttentionManager(SingleTypeKVCacheManager):
    """Each token sees all before it: a hit has every block from the first on."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, copies: Container[BlockHash] = ()
    ) -> list[KVCacheBlock]:
        end = max_length // self.block_size
        prefix = self._pool.get_cached_prefix(self.keys_of(block_hashes[:end]))
        if copies != ():
            for key in self.keys_of(block_hashes[len(prefix) : end]):
                if key not in copies:
                    break
                prefix.append(TO_LOAD)
        return prefix


class LocalAttentionManager(SingleTypeKVCacheManager):
    """Each token sees some of the last ones: a hit has the blocks that the first token after it sees, and the
    null block in place of all before them.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        group_id: int | None,
        group: KVCacheGroup,
        max_step_tokens: int,
    ) -> None:
        """``max_step_tokens``: the most tokens of a request that are computed before its window moves on."""
        super().__init__(pool, block_size, group_id)
        self._group = group
        self.num_window_blocks = num_window_blocks([group], block_size)
        """The most blocks before it that a block's first token sees."""
        self.max_blocks_per_request = self.num_window_blocks + -(-max_step_tokens // block_size) + 1
        """The most blocks that one request holds: what a step reads and writes, neither of them aligned."""
        self._branch_ends: dict[str, tuple[int, ...]] = {}

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return self._group.num_skipped_tokens(num_computed_tokens)

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_length: int, copies: Container[BlockHash] = ()
    ) -> list[KVCacheBlock]:
        """Search from the right for as many cached blocks in a row as the next token sees.

        A prefix cannot end after a missing block among those. They are looked up from the first one on, so
        that where nothing is cached the search moves by a whole window or chunk.
        """
        end = min(max_length // self.block_size, len(block_hashes))
        while end > 0:
            start = self.num_skipped_blocks(end)
            seen = self._cached_run(block_hashes, start, end, copies)
            end = start + len(seen)
            if self.num_skipped_blocks(end) == start:
                return [self._pool.null_block] * start + seen
        return []

    def _cached_run(
        self, block_hashes: Sequence[BlockHash], start: int, end: int, copies: Container[BlockHash]
    ) -> list[KVCacheBlock]:
        """The blocks from ``start`` on, up to ``end`` or the first one that is neither cached nor copied."""
        pool = self._pool
        key_of = self.key_of
        run: list[KVCacheBlock] = []
        for index in range(start, end):
            key = key_of(block_hashes[index])
            block = pool.get_cached_block(key) or (TO_LOAD if key in copies else None)
            if block is None:
                break
            run.append(block)
        return run

    def num_blocks_to_allocate(self, request_id: str, num_tokens: int, hit: Sequence[KVCacheBlock]) -> int:
        """As in the base class, but a starting request takes at most ``max_blocks_per_request``."""
        table = self.req_to_blocks.get(request_id)
        num_new = -(-num_tokens // self.block_size) - len(table or ()) - len(hit)
        held = [block for block in hit if block is not self._pool.null_block]
        if table is None:
            num_new = min(num_new, self.max_blocks_per_request - len(held))
        return max(num_new, 0) + [block.ref_cnt for block in held].count(0)

    def add_hit(self, request_id: str, hit: Sequence[KVCacheBlock]) -> None:
        self._pool.touch(block for block in hit if block is not self._pool.null_block)
        self.adopt(request_id, hit, len(hit))

    def expect_branches(self, request_id: str, ends: tuple[int, ...]) -> None:
        """Note after how many blocks others may continue: what they would need is worth caching."""
        self._branch_ends[request_id] = ends

    def _branches(self, request_id: str) -> list[range]:
        """The blocks needed to continue at each expected branch end, or one block before it."""
        ends = self._branch_ends.get(request_id, ())
        return [range(max(0, self.num_skipped_blocks(end) - 1), end) for end in ends]

    def to_store(self, request_id: str, start: int, end: int) -> Iterable[int]:
        """The blocks in the window at ``end``, as the request may lose its blocks there, and of branches.

        Copies of others would be useless, and evict what others return for.
        """
        first = max(start, self.num_skipped_blocks(end))
        of_branches = chain.from_iterable(
            range(max(start, branch.start), min(first, branch.stop)) for branch in self._branches(request_id)
        )
        return [*sorted(set(of_branches)), *range(first, end)]

    def left_behind(self, request_id: str, start: int, end: int) -> list[int]:
        """Blocks in the window at ``start`` and not in that at ``end``, except for those of branches."""
        branches = self._branches(request_id)
        left = range(self.num_skipped_blocks(start), min(start, self.num_skipped_blocks(end)))
        return [index for index in left if not any(index in branch for branch in branches)]

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Free the blocks that no token sees any more.

        They stay cached, but are evicted first: only a branch at that very place would hit them. Otherwise a
        long prefill would evict what others return for.
        """
        table = self.req_to_blocks[request_id]
        null = self._pool.null_block
        end = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        start = end
        while start > 0 and table[start - 1] is not null:
            start -= 1
        if start == end:
            return
        passed = list[KVCacheBlock]()
        of_branches = list[KVCacheBlock]()
        branches = self._branches(request_id)
        for index in range(end - 1, start - 1, -1):
            is_of_branch = any(index in branch for branch in branches)
            (of_branches if is_of_branch else passed).append(table[index])
        table[start:end] = [null] * (end - start)
        self._pool.free_stale(passed)
        self._pool.free_blocks(of_branches)

    def forget(self, request_id: str) -> None:
        """Forget the branches of a request that has ended or lost its blocks."""
        self._branch_ends.pop(request_id, None)


class SlidingWindowManager(LocalAttentionManager):
    """Each token sees the last ``sliding_window``, itself included."""


class ChunkedLocalAttentionManager(LocalAttentionManager):
    """Each token sees its chunk up to itself: a hit needs the blocks of the chunk in which it ends, from the
    first on, and none where a chunk begins.
    """


def make_manager(
    pool: BlockPool, block_size: int, group_id: int, group: KVCacheGroup, max_step_tokens: int
) -> FullAttentionManager | LocalAttentionManager:
    """The manager of one of several groups."""
    if group.is_full:
        return FullAttentionManager(pool, block_size, group_id)
    kind = ChunkedLocalAttentionManager if group.sliding_window is None else SlidingWindowManager
    return kind(pool, block_size, group_id, group, max_step_tokens)

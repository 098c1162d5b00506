"""The pool of KV blocks: who holds each block, which are free, and which of those are still cached.

A block without references is free. A free block keeps its hash, and can be hit until it is evicted for
something else. Empty blocks are used first, then stale ones, whose content no request is expected to need,
then the other cached ones, least recently used first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.needed_pins import NeededPins

if TYPE_CHECKING:
    from engine.core.kv_cache.block_lives import BlockLifeWatch
    from engine.core.kv_cache.kv_event_recorder import TierRecorder


@dataclass(slots=True, eq=False, repr=False)
class KVCacheBlock:
    """The state of one block, and its links in the lists of free, cached blocks."""

    block_id: int
    ref_cnt: int = 0
    block_hash: BlockHash | None = None
    prev_free: KVCacheBlock | None = field(default=None)
    next_free: KVCacheBlock | None = field(default=None)
    is_stale: bool = False
    """Whether it is free and cached, but no request is expected to need it."""
    pins_before: int = 0
    """How many pins had begun when it became free and stayed cached."""
    num_pins: int = 0
    """How many of its holders are pins that may be revoked."""

    def __repr__(self) -> str:
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}, hashed={self.block_hash is not None})"


LOOKED_UP_AT_ONCE = 64
"""Blocks of a prefix that are looked up together: a loop in C takes half the time of one here."""

TO_LOAD = KVCacheBlock(-3, block_hash=b"to load")
"""Placeholder in the table of a prefix for a block that only another tier has; no one holds it."""


class FreeKVCacheBlockQueue:
    """Doubly linked list of free, cached blocks.

    A block that is hit leaves from the middle in O(1). Two sentinels spare the edge cases.
    """

    __slots__ = ("_head", "_tail", "num_free_blocks", "pins_before")

    def __init__(self) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-2)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_free_blocks = 0
        self.pins_before = 0
        """How many pins have begun so far."""

    def popleft_n(self, count: int) -> list[KVCacheBlock]:
        """Remove the first ``count`` blocks; the list must have that many."""
        assert count <= self.num_free_blocks, "more blocks asked for than are free"
        self.num_free_blocks -= count
        taken: list[KVCacheBlock] = []
        block = self._head.next_free
        for _ in range(count):
            assert block is not None
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._head.next_free = block
        block.prev_free = self._head
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        assert block.prev_free is not None, "the block is not in the free list"
        _link(block.prev_free, block.next_free)
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def extend(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Append at the tail, to be evicted last."""
        last = self._tail.prev_free
        pins_before = self.pins_before
        assert last is not None
        for block in blocks:
            last.next_free = block
            block.prev_free = last
            block.pins_before = pins_before
            last = block
        last.next_free = self._tail
        self._tail.prev_free = last
        self.num_free_blocks += len(blocks)

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free


def _oldest(found: KVCacheBlock | dict[int, KVCacheBlock] | None) -> KVCacheBlock:
    """The block that has had a hash for longest, of those with that hash."""
    if type(found) is dict:
        return next(iter(found.values()))
    assert isinstance(found, KVCacheBlock)
    return found


def _link(before: KVCacheBlock | None, after: KVCacheBlock | None) -> None:
    if before is not None and after is not None:
        before.next_free = after
        after.prev_free = before


@dataclass(frozen=True, slots=True)
class BlockPoolStatistics:
    """Counts of usable blocks, without the null block."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Blocks, free or not, that are cached."""


class BlockPool:
    """All blocks of the KV cache. Block 0, the null block, is never handed out and never freed."""

    recorder: TierRecorder | None = None
    """Records which contents begin and cease to be cached; None: not recorded."""
    lives: BlockLifeWatch | None = None
    """Observes allocations, hits and evictions, to measure how long blocks live; None: not measured."""

    def __init__(self, num_blocks: int) -> None:
        """Make a pool of ``num_blocks`` blocks, including the null block."""
        assert num_blocks >= 2, "a pool needs the null block and one more"
        self.blocks = [KVCacheBlock(i) for i in range(num_blocks)]
        self.null_block = self.blocks[0]
        self._empty = self.blocks[:0:-1]
        """Free blocks that cache nothing, the next to be used last: none ever leaves from the middle."""
        self._stale = FreeKVCacheBlockQueue()
        """Free blocks that are evicted as soon as no block is empty."""
        self._cached = FreeKVCacheBlockQueue()
        """The other free blocks, least recently used first."""
        self.needed = NeededPins()
        """Estimates which pinned blocks would have been evicted."""
        self.num_pinned_alone = 0
        """Blocks held only by pins that may be revoked: they can be taken."""
        self.num_freed = 0
        """Number of blocks freed since the start; it only grows."""
        # All blocks of a hash, oldest first: requests that compute one prefix concurrently have equal blocks.
        self._by_hash: dict[BlockHash, KVCacheBlock | dict[int, KVCacheBlock]] = {}
        self._num_duplicates = 0
        """Cached blocks whose hash an older block has, too."""

    @property
    def num_usable_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        return len(self._empty) + self._stale.num_free_blocks + self._cached.num_free_blocks

    @property
    def num_free_empty_blocks(self) -> int:
        """Free blocks that cache nothing."""
        return len(self._empty)

    @property
    def has_duplicates(self) -> bool:
        """Whether several blocks cache the same content."""
        return self._num_duplicates > 0

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, free or not, that are cached."""
        return len(self._by_hash) + self._num_duplicates

    def get_cached_block(self, block_hash: BlockHash) -> KVCacheBlock | None:
        found = self._by_hash.get(block_hash)
        if type(found) is dict:
            return next(iter(found.values()))
        return found  # type: ignore[return-value]

    def get_cached_prefix(self, block_hashes: Iterable[BlockHash]) -> list[KVCacheBlock]:
        """The cached blocks of a chain up to its first miss; blocks after a miss are never a hit."""
        prefix: list[KVCacheBlock] = []
        all_found = map(self._by_hash.get, block_hashes)
        while found := list(islice(all_found, LOOKED_UP_AT_ONCE)):
            num_found = found.index(None) if None in found else len(found)
            if self._num_duplicates:
                prefix += map(_oldest, found[:num_found])
            else:
                prefix += found[:num_found]  # type: ignore[arg-type]
            if num_found < len(found):
                break
        return prefix

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Take ``count`` free blocks for one holder, and evict what they cached."""
        num_left = len(self._empty) - count
        if num_left >= 0:
            blocks = self._empty[num_left:]
            del self._empty[num_left:]
        else:
            blocks = [*reversed(self._reclaim(-num_left)), *self._empty]
            self._empty.clear()
        blocks.reverse()
        for block in blocks:
            block.ref_cnt = 1
        if self.lives is not None:
            self.lives.allocated(blocks)
        return blocks

    def _reclaim(self, count: int) -> list[KVCacheBlock]:
        """Take and evict free, cached blocks: stale ones first."""
        stale = self._stale.popleft_n(min(count, self._stale.num_free_blocks))
        for block in stale:
            block.is_stale = False
        evicted = self._cached.popleft_n(count - len(stale))
        if self.needed:
            self.needed.evicted([block.pins_before for block in evicted])
        blocks = stale + evicted
        for block in blocks:
            self.evict(block)
        return blocks

    def begin_pin(self, pin_id: int, num_blocks: int) -> None:
        """Begin a pin that alone holds ``num_blocks`` blocks: it comes before all blocks that become free
        from now on."""
        self._cached.pins_before += 1
        self.needed.begin(pin_id, self._cached.pins_before, num_blocks)

    def mark_pinned(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that a pin that may be revoked holds each of these blocks."""
        for block in blocks:
            block.num_pins += 1
            self.num_pinned_alone += block.num_pins == block.ref_cnt

    def unmark_pinned(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that such a pin is about to free these blocks."""
        for block in blocks:
            self.num_pinned_alone -= block.num_pins == block.ref_cnt
            block.num_pins -= 1

    def next_evicted(self, count: int) -> list[KVCacheBlock]:
        """The cached blocks, stale ones aside, that the next ``count`` new blocks evict."""
        num_evicted = count - len(self._empty) - self._stale.num_free_blocks
        return list(islice(self._cached, num_evicted)) if num_evicted > 0 else []

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a holder to each of these blocks, which are held or cached.

        Free neighbors, as the blocks of a prefix are, last first, leave their list together.
        """
        if self.lives is not None:
            blocks = list(blocks)
            self.lives.used(blocks)
        before: KVCacheBlock | None = None
        after: KVCacheBlock | None = None
        num_taken = 0
        for block in blocks:
            block.ref_cnt = num_holders = block.ref_cnt + 1
            if num_holders > 1:
                if block.num_pins == num_holders - 1:
                    self.num_pinned_alone -= 1
                continue
            if block is not before:
                if block.is_stale:
                    self._stale.remove(block)
                    block.is_stale = False
                    continue
                assert block.block_hash is not None, "a free block is hit that is not cached"
                _link(before, after)
                after = block.next_free
            before = block.prev_free
            num_taken += 1
        _link(before, after)
        self._cached.num_free_blocks -= num_taken

    def evict_first(self, block_hashes: Iterable[BlockHash]) -> int:
        """Let free blocks with these hashes be evicted before other cached ones, the first in order first.

        No request is expected to need them, but they can be hit until then. Returns their number.
        """
        stale: list[KVCacheBlock] = []
        for block_hash in block_hashes:
            found = self._by_hash.get(block_hash)
            if found is None:
                continue
            for block in found.values() if type(found) is dict else (found,):
                assert isinstance(block, KVCacheBlock)
                if block.ref_cnt == 0 and not block.is_stale:
                    self._cached.remove(block)
                    block.is_stale = True
                    stale.append(block)
        self._stale.extend(stale)
        return len(stale)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> int:
        """Remove a holder from each block; returns how many became free. The first are evicted first."""
        empty: list[KVCacheBlock] = []
        cached: list[KVCacheBlock] = []
        add_empty = empty.append
        add_cached = cached.append
        for block in ordered_blocks:
            if block.ref_cnt != 1:
                assert block.ref_cnt, "block freed twice"
                block.ref_cnt -= 1
                if block.num_pins == block.ref_cnt:
                    self.num_pinned_alone += 1
                continue
            block.ref_cnt = 0
            if block.block_hash is None:
                add_empty(block)
            else:
                add_cached(block)
        if empty:
            empty.reverse()
            self._empty += empty
        if cached:
            self._cached.extend(cached)
        num_freed = len(empty) + len(cached)
        self.num_freed += num_freed
        return num_freed

    def free_stale(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Remove a holder from each block. Those that become free are evicted before other cached ones."""
        stale = [block for block in blocks if block.ref_cnt == 1 and block.block_hash is not None]
        for block in stale:
            block.ref_cnt = 0
            block.is_stale = True
        self._stale.extend(stale)
        self.num_freed += len(stale)
        if len(stale) < len(blocks):
            self.free_blocks(block for block in blocks if not block.is_stale)

    def cache_full_blocks(
        self, blocks: Sequence[KVCacheBlock], hashes: Sequence[BlockHash], start: int, end: int
    ) -> None:
        """Cache ``blocks[start:end]``, which are full, under ``hashes[start:end]``."""
        by_hash = self._by_hash
        new = None if self.recorder is None else [h for h in hashes[start:end] if h not in by_hash]
        for index in range(start, end):
            block = blocks[index]
            block_hash = hashes[index]
            block.block_hash = block_hash
            known = by_hash.get(block_hash)
            if known is None:
                by_hash[block_hash] = block
                continue
            self._num_duplicates += 1
            if type(known) is dict:
                known[block.block_id] = block
            else:
                assert isinstance(known, KVCacheBlock)
                by_hash[block_hash] = {known.block_id: known, block.block_id: block}
        if new and self.recorder is not None:
            self.recorder.stored(new)

    def evict(self, block: KVCacheBlock) -> None:
        """Evict a block from the prefix cache: it is about to hold something else, or its KV is wrong."""
        block_hash = block.block_hash
        assert block_hash is not None
        block.block_hash = None
        if self.lives is not None:
            self.lives.evicted(block)
        known = self._by_hash.pop(block_hash)
        if type(known) is dict:
            del known[block.block_id]
            if known:
                self._by_hash[block_hash] = known if len(known) > 1 else _oldest(known)
                self._num_duplicates -= 1
                return
        if self.recorder is not None:
            self.recorder.removed(block_hash)

    def evict_all(self) -> None:
        """Evict every block."""
        self._by_hash.clear()
        self._num_duplicates = 0
        stale = self._stale.popleft_n(self._stale.num_free_blocks)
        cached = self._cached.popleft_n(self._cached.num_free_blocks)
        self._empty = [*reversed(cached), *self._empty, *reversed(stale)]
        for block in self.blocks:
            block.block_hash = None
            block.is_stale = False
        if self.recorder is not None:
            self.recorder.cleared()
        if self.lives is not None:
            self.lives.cleared()

    def statistics(self) -> BlockPoolStatistics:
        return BlockPoolStatistics(self.num_usable_blocks, self.num_free_blocks, self.num_cached_blocks)

    def check_invariants(self, references: dict[int, int]) -> None:
        """Raise AssertionError unless every block is held exactly as ``references`` (id to count) says."""
        free = [block.block_id for part in (self._empty, self._stale, self._cached) for block in part]
        assert len(free) == len(set(free)) == self.num_free_blocks, "free lists are inconsistent"
        assert all(block.block_hash is None for block in self._empty), "an empty block caches something"
        stale = {block.block_id for block in self._stale}
        assert stale == {b.block_id for b in self.blocks if b.is_stale}, "stale blocks are in the wrong list"
        cached = (*self._stale, *self._cached)
        assert all(block.block_hash is not None for block in cached), "a block caches nothing"
        in_free_list = set(free)
        for block in self.blocks[1:]:
            expected = references.get(block.block_id, 0)
            assert block.ref_cnt == expected, f"{block} should have {expected} holders"
            assert (block.ref_cnt == 0) == (block.block_id in in_free_list), f"{block} is in the wrong list"
        alone = [block for block in self.blocks if block.num_pins and block.num_pins == block.ref_cnt]
        assert len(alone) == self.num_pinned_alone, "blocks that only pins hold are miscounted"
        assert self.null_block.ref_cnt == 0
        assert 0 not in in_free_list
        assert 0 not in references
        self._check_hashes()

    def _check_hashes(self) -> None:
        cached: dict[int, BlockHash] = {}
        for block_hash, known in self._by_hash.items():
            assert type(known) is not dict or len(known) > 1, "one block alone is listed as several"
            for block in known.values() if type(known) is dict else [known]:
                cached[block.block_id] = block_hash  # type: ignore[union-attr]
        hashed = {block.block_id: block.block_hash for block in self.blocks if block.block_hash is not None}
        assert cached == hashed, "hash map and blocks disagree"
        assert len(hashed) == self.num_cached_blocks, "blocks with a hash are miscounted"

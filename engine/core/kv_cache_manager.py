"""KV blocks of requests, pins and loads: what the scheduler asks for memory.

A pin is a second kind of holder: it keeps the full blocks of a turn that ended. A load is a third: it keeps
the blocks that a copy writes, until it is done. A fence is a fourth: it keeps the blocks of a request that is
gone while a step that uses them is under way. All hold references like a request does, so everything the pool
promises (no reuse while held) is true of them without a special case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.core.block_hash import BlockHash
from engine.core.block_pool import BlockPool, KVCacheBlock
from engine.core.kv_cache_coordinator import KVCacheCoordinator, UnitaryKVCacheCoordinator
from engine.request import Request


@dataclass(frozen=True, slots=True)
class KVCacheStatistics:
    """Who holds the pool's usable blocks. Blocks held by a request and a pin count as running."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Blocks, free or not, that hold a findable prefix."""
    num_pinned_blocks: int
    """Blocks in pins; a block in two pins counts twice."""
    num_pins: int


NO_BLOCKS: list[KVCacheBlock] = []


@dataclass(frozen=True, slots=True)
class _Shortage:
    """Why a waiting request found no room."""

    num_hit_blocks: int
    num_missing: int
    num_freed: int
    """``BlockPool.num_freed`` then."""


class KVCacheManager:
    """Finds, allocates and frees the blocks of requests; holds the blocks of pins and of loads."""

    def __init__(
        self, num_blocks: int, block_size: int, max_model_len: int, enable_caching: bool = True
    ) -> None:
        """``num_blocks`` counts the null block."""
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks)
        self._max_model_len = max_model_len
        self._coordinator: KVCacheCoordinator = UnitaryKVCacheCoordinator(self.pool, block_size)
        self._requests: set[str] = set()
        self._shortages: dict[str, _Shortage] = {}
        self._pins: dict[int, list[KVCacheBlock]] = {}
        self._num_pinned_blocks = 0
        self._loads: dict[int, list[KVCacheBlock]] = {}
        self._fences: dict[int, list[KVCacheBlock]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    # ---- requests ----

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Cached blocks of the request's prefix, and the tokens in them.

        The last token is never among them: it has to be computed to have logits to sample from.
        """
        if not self.enable_caching:
            return NO_BLOCKS, 0
        hit = self._coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return hit, len(hit) * self.block_size

    def num_blocks_short(
        self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock] = NO_BLOCKS
    ) -> int:
        """Blocks missing to give the request room for ``num_tokens`` in all; 0 or less if it fits."""
        needed = self._coordinator.num_blocks_to_allocate(
            request.request_id, min(num_tokens, self._max_model_len), hit
        )
        return needed - self.pool.num_free_blocks

    def are_shared(self, request: Request, num_new_tokens: int) -> bool:
        """Whether anybody else holds a block that the request fills with its next so many tokens.

        Such a block is found as soon as its tokens are scheduled: whoever did counts on their computation.
        """
        start = request.num_computed_tokens // self.block_size
        end = (request.num_computed_tokens + num_new_tokens) // self.block_size
        return start < end and any(
            block.ref_cnt > 1 for block in self._coordinator.blocks_of(request.request_id)[start:end]
        )

    def are_cached(self, hit: Sequence[KVCacheBlock]) -> bool:
        """Whether all blocks of a hit can still be found."""
        return all(block.block_hash is not None for block in hit)

    def note_shortage(self, request: Request, hit: Sequence[KVCacheBlock]) -> None:
        """All tokens of this waiting request were looked for and found no room."""
        missing = self.num_blocks_short(request, request.num_tokens, hit)
        self._shortages[request.request_id] = _Shortage(len(hit), missing, self.pool.num_freed)

    def num_surely_missing(self, request: Request) -> int:
        """Blocks that a request with a noted shortage misses at least, by a bound that costs nothing; 0 if
        nothing is known.

        What it misses is its length less the blocks that are free or hit. That shrinks only by blocks that
        became free since, and by a longer hit: one look at the block behind the old one tells.
        """
        shortage = self._shortages.get(request.request_id)
        if shortage is None:
            return 0
        missing = shortage.num_missing - (self.pool.num_freed - shortage.num_freed)
        following = shortage.num_hit_blocks
        if following >= (request.num_tokens - 1) // self.block_size or not self.enable_caching:
            return missing
        return missing if self.pool.get_cached_block(request.block_hashes[following]) is None else 0

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: Sequence[KVCacheBlock] = NO_BLOCKS
    ) -> list[KVCacheBlock] | None:
        """Room for ``num_new_tokens`` more after what is computed and hit; None, and no change, if it is not
        there.

        Full blocks become findable at once: who reads them in this very step is planned behind the one that
        fills them, and the worker keeps to that.
        """
        request_id = request.request_id
        num_computed = request.num_computed_tokens + len(hit) * self.block_size
        num_tokens = min(num_computed + num_new_tokens, self._max_model_len)
        coordinator = self._coordinator
        if not hit and coordinator.has_room(request_id, num_tokens):  # most steps of most requests
            if self.enable_caching:
                coordinator.cache_blocks(
                    request_id, request.block_hashes, min(num_tokens, request.num_tokens)
                )
            return NO_BLOCKS
        if coordinator.num_blocks_to_allocate(request_id, num_tokens, hit) > self.pool.num_free_blocks:
            return None
        if request_id not in self._requests:
            self._requests.add(request_id)
            self._shortages.pop(request_id, None)
            coordinator.add_hit(request_id, hit)
        blocks = coordinator.allocate_new_blocks(request_id, num_tokens)
        if self.enable_caching:
            coordinator.cache_blocks(request_id, request.block_hashes, min(num_tokens, request.num_tokens))
        return blocks

    def cache_computed(self, request: Request) -> None:
        """Let the full blocks of the request's computed tokens, all of which are known, be found."""
        request_id = request.request_id
        if self.enable_caching and request_id in self._requests:
            self._coordinator.cache_blocks(request_id, request.block_hashes, request.num_computed_tokens)

    def forget(self, request: Request) -> None:
        """Let nobody find the blocks that the request holds: what they hold is of no use."""
        self._coordinator.forget_blocks(request.request_id)

    def block_ids(self, request_id: str, start: int = 0, end: int | None = None) -> list[int]:
        return [block.block_id for block in self._coordinator.blocks_of(request_id)[start:end]]

    def blocks_of_request(self, request_id: str) -> list[KVCacheBlock]:
        """As it holds them now: a list of the caller's own."""
        return list(self._coordinator.blocks_of(request_id))

    def blocks_of_pin(self, pin_id: int) -> list[KVCacheBlock]:
        """As it holds them now: a list of the caller's own."""
        return list(self._pins[pin_id])

    def num_blocks_of(self, request_id: str) -> int:
        return len(self._coordinator.blocks_of(request_id))

    def free(self, request: Request, num_computed_tokens: int | None = None) -> None:
        """Let go of a request's blocks, tail first: the head of a prefix is worth the most.

        ``num_computed_tokens``: only so many tokens were really computed (it was scheduled in this step and
        withdrawn); blocks beyond must not be found by anybody.
        """
        request_id = request.request_id
        self._shortages.pop(request_id, None)
        if request_id not in self._requests:
            return
        if num_computed_tokens is not None and self.enable_caching:
            self._coordinator.uncache_blocks(request_id, num_computed_tokens)
        self._requests.discard(request_id)
        blocks, _ = self._coordinator.take(request_id)
        self.pool.free_blocks(reversed(blocks))

    # ---- pins ----

    @property
    def num_pinned_blocks(self) -> int:
        return self._num_pinned_blocks

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    def pin(self, request: Request, pin_id: int, num_blocks: int) -> None:
        """The request ends; its first ``num_blocks`` full blocks stay held by the pin, the rest is freed."""
        assert pin_id not in self._pins
        self._requests.discard(request.request_id)
        blocks, num_cached = self._coordinator.take(request.request_id)
        assert num_blocks <= num_cached, "only full, findable blocks are worth holding"
        self._pins[pin_id] = blocks[:num_blocks]
        self._num_pinned_blocks += num_blocks
        self.pool.free_blocks(reversed(blocks[num_blocks:]))

    def unpin(self, pin_id: int) -> None:
        """The pin ends; blocks nobody else holds become ordinary cached blocks."""
        blocks = self._pins.pop(pin_id)
        self._num_pinned_blocks -= len(blocks)
        self.pool.free_blocks(reversed(blocks))

    def shrink_pin(self, pin_id: int, num_blocks: int) -> None:
        """The pin loses its last ``num_blocks`` blocks."""
        blocks = self._pins[pin_id]
        assert 0 < num_blocks < len(blocks)
        lost = blocks[-num_blocks:]
        del blocks[-num_blocks:]
        self._num_pinned_blocks -= num_blocks
        self.pool.free_blocks(reversed(lost))

    def num_tail_blocks_to_free(self, pin_id: int, wanted: int) -> tuple[int, int]:
        """How many blocks to cut off a pin's tail to free ``wanted``, and how many that really frees.

        Blocks that a request or another pin also holds do not become free.
        """
        freed = 0
        blocks = self._pins[pin_id]
        for count, block in enumerate(reversed(blocks), start=1):
            freed += block.ref_cnt == 1
            if freed == wanted:
                return count, freed
        return len(blocks), freed

    def reuse_first(self, block_hashes: Sequence[BlockHash]) -> int:
        """The end of a chain that nobody is expected to ask for: what of it nobody holds is reused before
        anything else that is cached, its last block first. Returns how many blocks that is."""
        return self.pool.reuse_first(reversed(block_hashes))

    # ---- loads ----

    def begin_load(
        self, load_id: int, request: Request, hit: Sequence[KVCacheBlock], num_tokens: int
    ) -> list[int]:
        """Blocks for all tokens of a waiting request, for which there is room; those of the ``num_tokens``
        behind its hit, whose ids are returned, are the load's too.

        None of them is findable before ``cache_computed``.
        """
        assert load_id not in self._loads
        request_id = request.request_id
        self._requests.add(request_id)
        self._shortages.pop(request_id, None)
        self._coordinator.add_hit(request_id, hit)
        blocks = self._coordinator.allocate_new_blocks(
            request_id, min(request.num_tokens, self._max_model_len)
        )
        self._loads[load_id] = loaded = blocks[: num_tokens // self.block_size]
        self.pool.touch(loaded)
        return [block.block_id for block in loaded]

    def end_load(self, load_id: int) -> None:
        """Nothing writes these blocks any more."""
        self.pool.free_blocks(reversed(self._loads.pop(load_id)))

    # ---- fences ----

    def fence(self, step_id: int, request: Request) -> None:
        """The request is about to let go of its blocks, which this step, and none after it, still uses."""
        blocks = self._coordinator.blocks_of(request.request_id)
        self.pool.touch(blocks)
        self._fences.setdefault(step_id, []).extend(blocks)

    def end_fence(self, step_id: int) -> None:
        """The step is back."""
        blocks = self._fences.pop(step_id, None)
        if blocks is not None:
            self.pool.free_blocks(reversed(blocks))

    @property
    def has_fences(self) -> bool:
        return bool(self._fences)

    @property
    def num_returning_blocks(self) -> int:
        """Blocks that become free when the steps under way are back; linear in those that are fenced."""
        return sum(block.ref_cnt == 1 for blocks in self._fences.values() for block in blocks)

    def check_fences(self, step_ids: Sequence[int]) -> None:
        """Raise AssertionError if there is a fence for another step than these."""
        assert self._fences.keys() <= set(step_ids), "blocks are kept for a step that is back"

    # ---- all ----

    @property
    def only_pins_hold(self) -> bool:
        """Whether no request and no load holds a block."""
        return not self._requests and not self._loads

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes; False, and no change, while a request, a pin or a load holds blocks. Fenced
        ones come back empty."""
        if self._requests or self._pins or self._loads:
            return False
        self.pool.forget_all()
        return True

    def statistics(self) -> KVCacheStatistics:
        pool = self.pool.statistics()
        return KVCacheStatistics(
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_pinned_blocks=self._num_pinned_blocks,
            num_pins=len(self._pins),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block is held by exactly those that list it."""
        references: Counter[int] = Counter()
        for request_id in self._requests:
            references.update(self.block_ids(request_id))
        for blocks in (*self._pins.values(), *self._loads.values(), *self._fences.values()):
            references.update(block.block_id for block in blocks)
        assert self._num_pinned_blocks == sum(map(len, self._pins.values()))
        self.pool.check_invariants(dict(references))

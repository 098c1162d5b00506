"""Manages the KV blocks of requests, pins and loads for the scheduler.

A pin is a second kind of holder: it keeps the full blocks of a turn that ended. A load is a third: it keeps
the blocks that a copy writes, until it is done. A deferred free is a fourth: it keeps the blocks of a request
that has left while a step that uses them is under way. All hold references as a request does, so the pool's
promise (no reuse while held) covers them without a special case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_pool import TO_LOAD, BlockPool, KVCacheBlock
from engine.core.kv_cache.known_chains import KnownChains
from engine.core.kv_cache.kv_cache_coordinator import get_kv_cache_coordinator
from engine.core.kv_cache.kv_cache_statistics import KVCacheStatistics
from engine.core.kv_cache.pinned_blocks import PinnedBlocks
from engine.core.kv_cache.shortages import Shortage
from engine.core.kv_cache.state_copies import StateLayout
from engine.core.kv_cache.state_manager import StateManager
from engine.core.kv_cache.tiered_blocks import LoadablePrefix, TieredBlocks
from engine.core.request import Request
from engine.records.kv_cache_groups import (
    ONE_FULL_GROUP,
    KVCacheGroup,
    attention_groups,
    blocks_per_state,
    num_window_blocks,
)

NO_BLOCKS: list[KVCacheBlock] = []


class KVCacheManager:
    """Finds, allocates and frees the blocks of requests; holds the blocks of pins and of loads."""

    num_lookahead_tokens = 0
    """Places for a drafter's KV after the tokens of a request; it drafts less where they do not fit."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        enable_caching: bool = True,
        kv_cache_groups: Sequence[KVCacheGroup] = ONE_FULL_GROUP,
        max_step_tokens: int | None = None,
        num_states: int = 0,
    ) -> None:
        """Make one over ``num_blocks`` blocks of any group, including the null block.

        ``num_states``: state slots, including slot 0, for a model with a group of states. ``max_step_tokens``
        bounds what is computed of a request before its windows move on, which limits the blocks of a long
        prompt in a group with a window; None: no bound.
        """
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.kv_cache_groups = tuple(kv_cache_groups)
        self.pool = BlockPool(num_blocks)
        self._max_model_len = max_model_len
        max_step_tokens = min(max_model_len, max_step_tokens or max_model_len)
        self._coordinator = get_kv_cache_coordinator(
            self.pool,
            block_size,
            attention_groups(self.kv_cache_groups),
            enable_caching=enable_caching,
            max_step_tokens=max_step_tokens,
        )
        state_blocks = blocks_per_state(self.kv_cache_groups)
        layout = StateLayout(num_blocks, state_blocks)
        self.states = StateManager(num_states, block_size, layout, enable_caching) if state_blocks else None
        """The states of a model that has layers with states."""
        self.num_groups = self._coordinator.num_groups
        self.has_windows = self._coordinator.has_windows
        self.is_unitary = self.num_groups == 1 and not self.has_windows and self.states is None
        self._shortage_slack = num_window_blocks(attention_groups(self.kv_cache_groups), block_size)
        self._max_step_blocks = -(-max_step_tokens // block_size) + 1
        self._chains = KnownChains(self.pool)
        self._requests: set[str] = set()
        self._shortages: dict[str, Shortage] = {}
        self.pinned = PinnedBlocks(self.pool, self._coordinator, self.kv_cache_groups, self.states)
        self.tiered = TieredBlocks(self.pool, self._coordinator, self.states, max_step_tokens)
        self._deferred: dict[int, list[KVCacheBlock]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    # ---- requests ----

    def get_computed_blocks(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Cached blocks of the request's prefix, and the tokens in them.

        The last token is never among them: it must be computed to get logits to sample from.
        """
        if not self.enable_caching:
            return NO_BLOCKS, 0
        hit = self._hit_of_turn(request) if request.continues is not None and self.is_unitary else NO_BLOCKS
        hit = hit or self.pinned.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return hit, self.num_tokens_of(hit)

    def _hit_of_turn(self, request: Request) -> list[KVCacheBlock]:
        """The hit, from the known blocks of the turn that is continued; empty if these do not suffice."""
        assert request.continues is not None
        num_blocks = (request.continues.num_tokens - 1) // self.block_size
        max_blocks = (request.num_tokens - 1) // self.block_size
        return self._chains.find(request.block_hashes, num_blocks, max_blocks)

    def note_turn(self, request: Request) -> None:
        """Remember the blocks of an ending turn that may be continued."""
        if self.enable_caching and self.is_unitary:
            num_blocks = min(request.num_computed_tokens, request.num_tokens - 1) // self.block_size
            self._chains.note(
                request.block_hashes, self._coordinator.blocks_of(request.request_id)[:num_blocks]
            )

    def num_tokens_of(self, hit: Sequence[KVCacheBlock]) -> int:
        """How many tokens a hit covers: it has a block of every group for each block of tokens."""
        return len(hit) // self.num_groups * self.block_size

    def num_blocks_short(
        self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock] = NO_BLOCKS
    ) -> int:
        """Free blocks that the request lacks to have ``num_tokens`` in all; 0 or less if it fits."""
        needed = self._coordinator.num_blocks_to_allocate(
            request.request_id, min(num_tokens, self._max_model_len), hit
        )
        return needed - self.pool.num_free_blocks

    def num_states_short(self, request: Request, hit: Sequence[KVCacheBlock] = NO_BLOCKS) -> int:
        """Free state slots that the request lacks; 0 or less if it fits, or needs none."""
        return 0 if self.states is None else self.states.num_short(request, len(hit) // self.num_groups)

    def fits(self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock] = NO_BLOCKS) -> bool:
        """Whether there are blocks for ``num_tokens`` of the request in all, and free states."""
        has_room = self._has_room(request.request_id, min(num_tokens, self._max_model_len), hit)
        return has_room and self.num_states_short(request, hit) <= 0

    def _has_room(self, request_id: str, num_tokens: int, hit: Sequence[KVCacheBlock]) -> bool:
        """Whether there are free blocks. Counting the free blocks of a hit is slow, so it comes last."""
        num_needed = self._coordinator.num_blocks_to_allocate
        num_free = self.pool.num_free_blocks
        if num_needed(request_id, num_tokens, NO_BLOCKS) <= num_free:
            return True
        return bool(hit) and num_needed(request_id, num_tokens, hit) <= num_free

    def fits_after_deferred(self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock]) -> bool:
        """Whether the request fits once the steps under way have returned."""
        num_short = self.num_blocks_short(request, num_tokens, hit)
        return num_short <= self.num_deferred_blocks and self.num_states_short(request, hit) <= 0

    def are_shared(self, request: Request, num_new_tokens: int) -> bool:
        """Whether another holder has a block that the request fills with its next ``num_new_tokens``.

        A block is cached as soon as its tokens are scheduled: requests that hit it rely on their computation.
        """
        start = request.num_computed_tokens // self.block_size * self.num_groups
        end = (request.num_computed_tokens + num_new_tokens) // self.block_size * self.num_groups
        return start < end and any(
            block.ref_cnt > 1 for block in self._coordinator.blocks_of(request.request_id)[start:end]
        )

    def are_cached(self, hit: Sequence[KVCacheBlock]) -> bool:
        """Whether all blocks of a hit are still cached."""
        null = self.pool.null_block
        return all(block.block_hash is not None or block is null for block in hit)

    def record_shortage(self, request: Request, hit: Sequence[KVCacheBlock]) -> None:
        """Record that this waiting request does not fit with all its tokens."""
        num_short = self.num_blocks_short(request, request.num_tokens, hit)
        self.pool.needed.short_of(num_short)
        missing = num_short - self._shortage_slack
        num_cached = hit.index(TO_LOAD) if TO_LOAD in hit else len(hit)
        num_hit_blocks = num_cached // self.num_groups
        self._shortages[request.request_id] = Shortage(num_hit_blocks, missing, self.pool.num_freed)

    def min_missing_blocks(self, request: Request) -> int:
        """Lower bound of the blocks that a request with a recorded shortage lacks; 0 if nothing is known.

        The bound costs nothing. A request lacks its length less the blocks that are free or hit. That shrinks
        only by blocks freed since, and by a longer hit, which the block after the old hit shows. In a group
        with a window a shorter hit may need less by what the window has, which is left out of the bound.
        Where there are only windows, a longer hit may begin anywhere, so nothing is known.
        """
        shortage = self._shortages.get(request.request_id)
        if shortage is None:
            return 0
        missing = shortage.num_missing - (self.pool.num_freed - shortage.num_freed)
        following = shortage.num_hit_blocks
        if following >= (request.num_tokens - 1) // self.block_size or not self.enable_caching:
            return missing
        key = self._coordinator.key_of_full(request.block_hashes[following])
        return missing if key is not None and self.pool.get_cached_block(key) is None else 0

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: Sequence[KVCacheBlock] = NO_BLOCKS
    ) -> list[KVCacheBlock] | None:
        """Allocate blocks for ``num_new_tokens`` after what is computed and hit, and return the new ones.

        None, and nothing is changed, if there are not enough. Full blocks are cached at once: a request that
        reads them in the same step is planned after the one that fills them, and the worker keeps the order.
        """
        request_id = request.request_id
        num_computed = request.num_computed_tokens + (self.num_tokens_of(hit) if hit else 0)
        num_tokens = min(num_computed + num_new_tokens, self._max_model_len)
        num_places = min(num_tokens + self.num_lookahead_tokens, self._max_model_len)
        coordinator = self._coordinator
        if not hit and coordinator.has_blocks_for(request_id, num_places):  # most steps of most requests
            if self.enable_caching:
                coordinator.cache_blocks(
                    request_id, request.block_hashes, min(num_tokens, request.num_tokens)
                )
            return NO_BLOCKS
        if not self._has_room(request_id, num_places, hit):
            num_places = num_tokens
            if not self._has_room(request_id, num_tokens, hit):
                return None
        if request_id not in self._requests:
            if self.states is not None:
                if self.num_states_short(request, hit) > 0:
                    return None
                self.states.start(request, len(hit) // self.num_groups, self._num_shared_blocks(request))
            self._requests.add(request_id)
            self._shortages.pop(request_id, None)
            coordinator.add_hit(request_id, hit)
            if self.has_windows:
                self.tiered.expect_branches(request)
        blocks = coordinator.allocate_new_blocks(request_id, num_places)
        if self.enable_caching:
            coordinator.cache_blocks(request_id, request.block_hashes, min(num_tokens, request.num_tokens))
        return blocks

    # ---- states ----

    def aligned(
        self, request: Request, num_new_tokens: int, hit: Sequence[KVCacheBlock] | None = None
    ) -> int:
        """How many of these tokens a step may compute to end where a state is to be kept.

        ``hit`` is given for a request that is about to start.
        """
        if self.states is None or not self.enable_caching or num_new_tokens <= 1:
            return num_new_tokens
        if hit is None:
            ends = self.states.branch_ends_of(request) or ()
            return self.states.aligned(request, request.num_computed_tokens, num_new_tokens, ends)
        ends = self.states.branch_ends(request, self._num_shared_blocks(request))
        return self.states.aligned(request, self.num_tokens_of(hit), num_new_tokens, ends)

    def _num_shared_blocks(self, request: Request) -> int:
        """Number of blocks of the request's prefix that are cached, with or without a state at their end."""
        if not self.enable_caching:
            return 0
        found = self._coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
        return len(found) // self.num_groups

    def cache_computed(self, request: Request) -> None:
        """Cache the full blocks of the request's computed tokens, all of which are known."""
        request_id = request.request_id
        if self.enable_caching and request_id in self._requests:
            self._coordinator.cache_blocks(request_id, request.block_hashes, request.num_computed_tokens)

    def remove_skipped_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Free what the request's windows have left. No step under way computes its first tokens."""
        if request.request_id in self._requests:
            self._coordinator.remove_skipped_blocks(request.request_id, num_computed_tokens)

    def evict(self, request: Request) -> None:
        """Evict the blocks that the request holds from the prefix cache: their content is of no use."""
        self._coordinator.evict_blocks(request.request_id)
        if self.states is not None:
            self.states.evict(request)

    def block_ids(self, request_id: str, start: int = 0, end: int | None = None) -> list[int]:
        """The request's block table, or a part of it: by block and within it by group, 0 for none."""
        table = self._coordinator.blocks_of(request_id)
        num_groups = self.num_groups
        return [
            block.block_id for block in table[start * num_groups : None if end is None else end * num_groups]
        ]

    def blocks_of_request(self, request_id: str) -> list[KVCacheBlock]:
        """A copy of the list of blocks that the request holds now."""
        return list(self._coordinator.held_by(request_id))

    def blocks_of_pin(self, pin_id: int) -> list[KVCacheBlock]:
        """A copy of the list of blocks that the pin holds now."""
        return self.pinned.blocks_of(pin_id)

    def num_blocks_of(self, request_id: str) -> int:
        """How many blocks the request holds, over all groups of attention layers."""
        return len(self._coordinator.held_by(request_id))

    def num_slots_of(self, request_id: str) -> int:
        """How many tokens fit in the request's block table."""
        return len(self._coordinator.blocks_of(request_id)) // self.num_groups * self.block_size

    def free(self, request: Request, num_computed_tokens: int | None = None) -> None:
        """Free a request's blocks, tail first, as the head of a prefix is worth the most.

        ``num_computed_tokens`` is given if the request was scheduled in this step and withdrawn: only these
        tokens were computed, and the blocks beyond them are evicted.
        """
        request_id = request.request_id
        self._shortages.pop(request_id, None)
        if request_id not in self._requests:
            return
        if num_computed_tokens is not None and self.enable_caching:
            self._coordinator.uncache_blocks(request_id, num_computed_tokens)
        self._requests.discard(request_id)
        if self.states is not None:
            self.states.free(request)
        self.pool.free_blocks(reversed(self._coordinator.take(request_id)))

    # ---- pins ----

    @property
    def num_pinned_blocks(self) -> int:
        return self.pinned.num_blocks

    @property
    def num_pins(self) -> int:
        return len(self.pinned)

    def pin(self, request: Request, pin_id: int, num_blocks: int) -> bool:
        """End a request: a pin holds the blocks in a hit of its first ``num_blocks`` full blocks.

        The rest is freed. False if the next turn would hit less of it: then the pin must be cut.
        """
        self._requests.discard(request.request_id)
        held, others = self._coordinator.take_prefix(request.request_id, num_blocks)
        self.pinned.hold(pin_id, held)
        self.pool.free_blocks(reversed(others))
        return self.states is None or self.states.pin(request, pin_id, num_blocks)

    def evict_first(self, block_hashes: Sequence[BlockHash]) -> int:
        """Let the end of a chain be evicted before all else, its last block first, if no one holds it.

        No request is expected to hit it. Returns how many blocks that is.
        """
        if self.states is not None:
            self.states.pool.evict_first(reversed(block_hashes))
        return self.pool.evict_first(reversed(self._coordinator.keys_of(block_hashes)))

    # ---- loads ----

    def join_tier(self, copies: Container[BlockHash], *, keeps_blocks: bool = True) -> None:
        """Take the names of the blocks that another tier has at any time; it may keep evicted states, too.

        A prefix may then end anywhere, so no shortage is known for a group with a window.
        """
        self.tiered.join(copies, keeps_blocks=keeps_blocks)
        num_local = sum(not group.is_full for group in self.kv_cache_groups)
        self._shortage_slack += num_local * self._max_step_blocks

    def begin_load(self, load_id: int, request: Request, prefix: LoadablePrefix) -> list[int]:
        """Allocate the blocks of a waiting request, which fits; returns the ids of those to load."""
        self._requests.add(request.request_id)
        self._shortages.pop(request.request_id, None)
        return self.tiered.begin_load(load_id, request, prefix, self._max_model_len)

    # ---- frees that are deferred ----

    def defer_free(self, step_id: int, request: Request) -> None:
        """Hold the blocks of a request that is about to free them until this step, the last user, ends."""
        blocks = self._coordinator.held_by(request.request_id)
        self.pool.touch(blocks)
        self._deferred.setdefault(step_id, []).extend(blocks)

    def release_deferred(self, step_id: int) -> None:
        """Free what was held for this step, which has returned."""
        blocks = self._deferred.pop(step_id, None)
        if blocks is not None:
            self.pool.free_blocks(reversed(blocks))

    @property
    def has_deferred(self) -> bool:
        """Whether any blocks wait for a step to be freed."""
        return bool(self._deferred)

    @property
    def num_deferred_blocks(self) -> int:
        """Blocks that become free when the steps under way return, counted one by one."""
        return sum(block.ref_cnt == 1 for blocks in self._deferred.values() for block in blocks)

    def check_deferred(self, step_ids: Sequence[int]) -> None:
        """Raise AssertionError if blocks are held for another step than these."""
        assert self._deferred.keys() <= set(step_ids), "blocks are held for a step that is back"

    # ---- all ----

    @property
    def only_pins_hold(self) -> bool:
        """Whether no request and no load holds a block."""
        return not self._requests and not len(self.tiered)

    def reset_prefix_cache(self) -> bool:
        """Evict all cached blocks; False, and nothing is changed, while a request, pin or load holds any.

        Blocks that wait for a step to be freed become free and empty.
        """
        if self._requests or self.num_pins or len(self.tiered):
            return False
        self.pool.evict_all()
        if self.states is not None:
            self.states.pool.evict_all()
        return True

    def statistics(self) -> KVCacheStatistics:
        """Counts of blocks and pins as they are now."""
        it = self.pool.statistics()
        blocks = it.num_blocks, it.num_free_blocks, it.num_cached_blocks
        return KVCacheStatistics(*blocks, self.num_pinned_blocks, self.num_pins)

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block is held by exactly those that list it."""
        references: Counter[int] = Counter()
        for request_id in self._requests:
            references.update(block.block_id for block in self._coordinator.held_by(request_id))
        for blocks in (*self.pinned.held(), *self.tiered.held(), *self._deferred.values()):
            references.update(block.block_id for block in blocks)
        self.pinned.check_invariants()
        self.pool.check_invariants(dict(references))
        if self.states is not None:
            self.states.check_invariants(self._requests)

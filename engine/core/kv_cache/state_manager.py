"""Manages the states of requests and pins, for layers that keep one of fixed size instead of KV per token.

A state slot has the state of all such layers for one sequence at one position. A step reads a request's state
from one slot and writes it to the same or another one. A slot that is read and not written becomes a
checkpoint, so taking one costs no copy. Checkpoints are at block boundaries, cached by the hash of the block
that ends there. They are taken where the next turn may continue: at the end of the prompt, where another
prompt left this one, and at the last full block, which moves on with the output.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from engine.core.kv_cache.state_copies import StateLayout
from engine.core.request import Request

MIN_STATES = 4
"""Slots of the smallest pool: slot 0, and for one request its hit, its state and a spare one."""


class _Fate(Enum):
    """What happens to a checkpoint when its request has a later one."""

    EVICTED = "evicted"
    """No request is expected to hit it."""
    PASSED = "passed"
    """It was hit, so its job has gone on: it is evicted before others."""
    CACHED = "cached"


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """A state that a request left at a block boundary."""

    num_tokens: int
    slot: KVCacheBlock
    fate: _Fate


@dataclass(slots=True)
class _RequestStates:
    """The slots of one request."""

    spare: list[KVCacheBlock]
    """Slots that hold nothing yet."""
    branch_ends: tuple[int, ...]
    """Numbers of tokens, ascending, after which others may continue."""
    fork: int
    """The branch end at which others have left before; 0: none."""
    current: KVCacheBlock | None = None
    """The slot with the state after all planned tokens; None: there are none."""
    checkpoints: list[_Checkpoint] = field(default_factory=list)
    """Ascending. The last may be ``current``, too."""
    num_lacking_tokens: int = 0
    """Tokens recomputed although their KV was cached, as there was no state after them."""
    loading: KVCacheBlock | None = None
    """The slot that receives the copied state from which the request continues."""

    @property
    def must_keep_current(self) -> bool:
        """Whether the next step may not overwrite the state that it reads."""
        return bool(self.checkpoints) and self.checkpoints[-1].slot is self.current

    def held(self) -> list[KVCacheBlock]:
        """All its slots, checkpoints from the last to the first."""
        slots = [checkpoint.slot for checkpoint in reversed(self.checkpoints)]
        if self.current is not None and not self.must_keep_current:
            slots.append(self.current)
        if self.loading is not None:
            slots.append(self.loading)
        return slots + self.spare


class StateManager:
    """Finds, allocates and frees state slots. Slot 0 is never handed out."""

    def __init__(self, num_states: int, block_size: int, layout: StateLayout, enable_caching: bool) -> None:
        """``num_states``: slots, including slot 0. ``layout``: the blocks of each."""
        assert num_states >= MIN_STATES, "a request that hits a state does not fit"
        self.pool = BlockPool(num_states)
        self.layout = layout
        self.blocks_per_state = layout.num_parts
        self.notes_evicted = False
        """Whether evicted states are kept for ``take_evicted``, as another tier may want them."""
        self._evicted: list[tuple[BlockHash, int]] = []
        self._loads: dict[int, KVCacheBlock] = {}
        """The slots that loads write, by load id."""
        self._block_size = block_size
        self._enable_caching = enable_caching
        self._num_reserved = 2 if enable_caching else 1
        self._requests: dict[str, _RequestStates] = {}
        self.pins: dict[int, KVCacheBlock] = {}
        self._forks: set[int] = set()
        """Slots of cached states after which several sequences have continued."""
        self._num_lacking_tokens = 0

    # ---- hits ----

    def longest_hit(
        self, block_hashes: Sequence[BlockHash], num_blocks: int, copies: Container[BlockHash] | None = None
    ) -> int:
        """Length in blocks, at most ``num_blocks``, of the longest prefix that has a state at its end:
        cached, or among ``copies``."""
        get = self.pool.get_cached_block
        is_among = self.layout.is_among
        for end in range(num_blocks, 0, -1):
            block_hash = block_hashes[end - 1]
            if get(block_hash) is not None or (copies is not None and is_among(block_hash, copies)):
                return end
        return 0

    def _cached_at(self, block_hashes: Sequence[BlockHash], num_blocks: int) -> KVCacheBlock | None:
        """The cached state after ``num_blocks`` blocks; None for 0 blocks."""
        return self.pool.get_cached_block(block_hashes[num_blocks - 1]) if num_blocks else None

    # ---- requests ----

    def num_short(self, request: Request, num_hit_blocks: int) -> int:
        """Free slots that the request lacks to start or continue; 0 or less if it has enough.

        After a hit without a cached state, one is to be loaded.
        """
        if request.request_id in self._requests:
            return 0
        hit = self._cached_at(request.block_hashes, num_hit_blocks)
        takes_one = num_hit_blocks > 0 and (hit is None or hit.ref_cnt == 0)
        return self._num_reserved + takes_one - self.pool.num_free_blocks

    def start(self, request: Request, num_hit_blocks: int, num_shared_blocks: int) -> None:
        """Allocate slots for a request, which fits.

        ``num_shared_blocks``: how many of its blocks were cached, with a state or without one.
        """
        assert request.request_id not in self._requests
        checkpoints = list[_Checkpoint]()
        hashes = request.block_hashes
        hit = self._cached_at(hashes, num_hit_blocks)
        assert hit is not None or not num_hit_blocks, "a hit without a state"
        if hit is not None:
            self.pool.touch([hit])
            fate = _Fate.CACHED if hit.block_id in self._forks else _Fate.PASSED
            checkpoints.append(_Checkpoint(num_hit_blocks * self._block_size, hit, fate))
            self._evict_passed_first(hashes[: num_hit_blocks - 1])
        num_lacking = (num_shared_blocks - num_hit_blocks) * self._block_size
        self._num_lacking_tokens += num_lacking
        self._requests[request.request_id] = _RequestStates(
            self._new_slots(self._num_reserved),
            self.branch_ends(request, num_shared_blocks),
            num_shared_blocks * self._block_size,
            hit,
            checkpoints,
            num_lacking,
        )

    def _evict_passed_first(self, block_hashes: Sequence[BlockHash]) -> None:
        """Let the states of a path whose job has gone on be evicted before others, except forks."""
        get = self.pool.get_cached_block
        forks = self._forks
        passed = (h for h in block_hashes if (slot := get(h)) is not None and slot.block_id not in forks)
        self.pool.evict_first(passed)

    def _new_slots(self, count: int) -> list[KVCacheBlock]:
        if self.notes_evicted:
            for slot in self.pool.next_evicted(count):
                assert slot.block_hash is not None, "a cached slot has a name"
                self._evicted.append((slot.block_hash, slot.block_id))
        slots = self.pool.get_new_blocks(count)
        self._forks.difference_update(slot.block_id for slot in slots)
        return slots

    def branch_ends(self, request: Request, num_shared_blocks: int) -> tuple[int, ...]:
        """Numbers of tokens, ascending, after which others are expected to leave the request.

        These are the ends of its prompt's last full block, and of the ``num_shared_blocks`` that others had.
        """
        prompt_end = (request.num_prompt_tokens - 1) // self._block_size
        return tuple(sorted({num_shared_blocks * self._block_size, prompt_end * self._block_size} - {0}))

    def branch_ends_of(self, request: Request) -> tuple[int, ...] | None:
        """The branch ends of a request that has slots."""
        states = self._requests.get(request.request_id)
        return None if states is None else states.branch_ends

    def aligned(
        self, request: Request, num_computed: int, num_new_tokens: int, branch_ends: Iterable[int]
    ) -> int:
        """How many of ``num_new_tokens`` tokens a step may compute, to end at a checkpoint.

        It ends at the next branch end, or else with a full block if it does not reach the last known token.
        """
        end = num_computed + num_new_tokens
        size = self._block_size
        for branch_end in branch_ends:
            if num_computed < branch_end < end:
                return branch_end - num_computed
        boundary = end // size * size
        if end < request.num_tokens and boundary > num_computed:
            return boundary - num_computed
        return num_new_tokens

    def plan_step(
        self, num_scheduled: Mapping[str, int], requests: Mapping[str, Request]
    ) -> dict[str, tuple[int, int]]:
        """Choose the slots of a step whose tokens do not yet count as computed.

        Returns, by request id, the slot that it reads, 0 for none, and the slot that it writes. The next step
        can hit what it writes.
        """
        slots = {i: self._advance(requests[i], num_tokens) for i, num_tokens in num_scheduled.items()}
        if self._enable_caching:
            for request_id in num_scheduled:
                self._cache(requests[request_id], self._requests[request_id])
        return slots

    def _advance(self, request: Request, num_tokens: int) -> tuple[int, int]:
        states = self._requests[request.request_id]
        source = states.current
        if source is None or states.must_keep_current:
            target = states.current = states.spare.pop()
        else:
            target = source
        end = request.num_computed_tokens + num_tokens
        if self._enable_caching:
            self._retire(request, states)
            if end % self._block_size == 0:
                self._take_checkpoint(states, end, target)
        return (0 if source is None else source.block_id), target.block_id

    def _take_checkpoint(self, states: _RequestStates, num_tokens: int, slot: KVCacheBlock) -> None:
        """Keep the state after ``num_tokens`` tokens, if the next step has another slot to write to."""
        if not states.spare:
            if not self.pool.num_free_blocks:
                return
            states.spare = self._new_slots(1)
        if num_tokens == states.fork:
            self._forks.add(slot.block_id)
        fate = _Fate.CACHED if num_tokens in states.branch_ends else _Fate.EVICTED
        states.checkpoints.append(_Checkpoint(num_tokens, slot, fate))

    def _retire(self, request: Request, states: _RequestStates) -> None:
        """Release the checkpoints before the last one whose tokens are all known."""
        checkpoints = states.checkpoints
        num_known = bisect_right(checkpoints, request.num_tokens, key=lambda each: each.num_tokens)
        for checkpoint in checkpoints[: max(0, num_known - 1)]:
            slot = checkpoint.slot
            if checkpoint.fate is _Fate.CACHED:
                self.pool.free_blocks([slot])
            elif checkpoint.fate is _Fate.PASSED:
                self.pool.free_stale([slot])
            elif slot.ref_cnt > 1 or states.spare:
                self._give_back(slot)
            else:
                self._evict(slot)
                states.spare.append(slot)
        del checkpoints[: max(0, num_known - 1)]

    def _give_back(self, slot: KVCacheBlock) -> None:
        """Remove a holder; a state that has no other is evicted."""
        if slot.ref_cnt == 1:
            self._evict(slot)
        self.pool.free_blocks([slot])

    def _evict(self, slot: KVCacheBlock) -> None:
        self._forks.discard(slot.block_id)
        if slot.block_hash is not None:
            self.pool.evict(slot)

    def _cache(self, request: Request, states: _RequestStates) -> None:
        """Name the checkpoints whose last block is full of known tokens."""
        hashes = request.block_hashes
        for checkpoint in states.checkpoints:
            num_blocks = checkpoint.num_tokens // self._block_size
            if checkpoint.slot.block_hash is None and num_blocks <= len(hashes):
                if self.pool.recorder is not None:
                    self.pool.recorder.begin(request.request_id, num_blocks - 1, num_blocks)
                self.pool.cache_full_blocks([checkpoint.slot], [hashes[num_blocks - 1]], 0, 1)

    def evict(self, request: Request) -> None:
        """Evict the request's states: their content is of no use."""
        states = self._requests.get(request.request_id)
        for slot in [] if states is None else states.held():
            self._evict(slot)

    def free(self, request: Request) -> None:
        """Free a request's slots. Its checkpoints stay cached, the last one for the longest."""
        states = self._requests.pop(request.request_id, None)
        if states is not None:
            self._cache(request, states)
            self.pool.free_blocks(reversed(states.held()))

    # ---- loads ----

    def begin_load(self, load_id: int, request: Request, num_loaded_blocks: int, num_shared: int) -> range:
        """Allocate slots for a request, which fits, and for the state after ``num_loaded_blocks`` blocks.

        ``num_shared``: see ``start``. Returns the ids of the blocks to load, which the load holds, too.
        """
        assert request.request_id not in self._requests
        slot, *spare = self._new_slots(1 + self._num_reserved)
        self._loads[load_id] = slot
        self.pool.touch([slot])
        num_lacking = (num_shared - num_loaded_blocks) * self._block_size
        self._num_lacking_tokens += num_lacking
        self._requests[request.request_id] = _RequestStates(
            spare,
            self.branch_ends(request, num_shared),
            num_shared * self._block_size,
            num_lacking_tokens=num_lacking,
            loading=slot,
        )
        return self.layout.blocks_of(slot.block_id)

    def cache_loaded(self, load_id: int, request: Request, num_loaded_blocks: int) -> None:
        """Let a request continue from the state that a load has brought; others may hit it, too."""
        if load_id not in self._loads:
            return
        states = self._requests[request.request_id]
        slot = self._loads[load_id]
        states.loading = None
        states.current = slot
        states.checkpoints.append(_Checkpoint(num_loaded_blocks * self._block_size, slot, _Fate.PASSED))
        self._cache(request, states)
        self._evict_passed_first(request.block_hashes[: num_loaded_blocks - 1])

    def end_load(self, load_id: int) -> None:
        """Release the slot of a load that has ended."""
        if (slot := self._loads.pop(load_id, None)) is not None:
            self.pool.free_blocks([slot])

    def take_evicted(self) -> list[tuple[BlockHash, int]]:
        """Names and slots of the states evicted since the last call, which stay there until the next step."""
        evicted = self._evicted
        self._evicted = []
        return evicted

    # ---- pins ----

    def pin(self, request: Request, pin_id: int, num_blocks: int) -> bool:
        """End a request: a pin holds the state after its first ``num_blocks`` blocks.

        False, and it holds none, if no slot was free to keep that state.
        """
        self.free(request)
        slot = self._cached_at(request.block_hashes, num_blocks)
        if slot is None:
            return False
        self.pool.touch([slot])
        self.pins[pin_id] = slot
        return True

    def end_pin(self, pin_id: int) -> None:
        """End a pin: its state stays cached."""
        if (slot := self.pins.pop(pin_id, None)) is not None:
            self.pool.free_blocks([slot])

    def move_pin(self, pin_id: int, block_hashes: Sequence[BlockHash], num_blocks: int) -> None:
        """Let a pin hold the state after its first ``num_blocks`` blocks, which is cached."""
        slot = self._cached_at(block_hashes, num_blocks)
        assert slot is not None, "a pin is cut to where a return would hit"
        self.pool.touch([slot])
        self.end_pin(pin_id)
        self.pins[pin_id] = slot

    def frees(self, pin_id: int) -> bool:
        """Whether a slot becomes free if the pin ends."""
        slot = self.pins.get(pin_id)
        return slot is not None and slot.ref_cnt == 1

    # ---- all ----

    def num_lacking_tokens_of(self, request_id: str) -> int:
        """Tokens of a running request whose KV was cached without a state after them."""
        return self._requests[request_id].num_lacking_tokens

    def take_num_lacking_tokens(self) -> int:
        """Tokens cached without a state after them, of all requests started since the last call."""
        num_tokens = self._num_lacking_tokens
        self._num_lacking_tokens = 0
        return num_tokens

    def num_held(self, request_id: str) -> int:
        """How many slots the request holds."""
        states = self._requests.get(request_id)
        return 0 if states is None else len(states.held())

    @property
    def num_pinned(self) -> int:
        """States in pins; one in two pins counts twice."""
        return len(self.pins)

    def check_invariants(self, request_ids: Iterable[str]) -> None:
        """Raise AssertionError unless each slot is held by exactly those that list it."""
        assert set(self._requests) == set(request_ids)
        references = Counter(slot.block_id for slot in (*self.pins.values(), *self._loads.values()))
        assert not self._evicted, "evicted states were not taken with the plan that evicts them"
        for states in self._requests.values():
            references.update(slot.block_id for slot in states.held())
            needs_spare = states.current is None or states.must_keep_current
            assert not needs_spare or states.spare, "the next step has nowhere to write"
            assert all(slot.ref_cnt == 1 and slot.block_hash is None for slot in states.spare)
        self.pool.check_invariants(dict(references))

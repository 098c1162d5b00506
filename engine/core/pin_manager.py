"""Carries out what the policy decides on pins: ends them, and revokes them where blocks are needed.

The policy says which pins may be revoked for whom, and in what order; this module knows what that frees.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain

from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.kv_leases import KVLeases
from engine.core.offload.pending_kv_loads import PendingKVLoads
from engine.core.pin_recorder import PinRecorder
from engine.core.policy import Pin, PinEnd, SchedulingPolicy, StalePrefix
from engine.core.request import Request

MAX_KEPT = 4096
"""Retention times kept for each cause of a pin's end, in case no one takes them."""


class PinManager:
    """Ends every pin, and counts it by cause; the KVCacheManager holds the blocks."""

    recorder: PinRecorder | None = None
    """Records changes of pins; None: not recorded."""

    def __init__(
        self, kv: KVCacheManager, loads: PendingKVLoads, policy: SchedulingPolicy, leases: KVLeases
    ) -> None:
        """A pin belongs to the policy, unless it is a lease."""
        self._kv = kv
        self._leases = leases
        self._loads = loads
        self._policy = policy
        self._held_since_s: dict[int, float] = {}
        self._num_ended: dict[str, int] = {}
        self._num_superseded_blocks = 0
        self._block_s: dict[str, float] = {}
        self._held_s: dict[str, deque[float]] = {}

    def begin(self, request: Request, now: float) -> Pin | None:
        """The pin that a turn which ended gets: a lease if its client ordered one, else the policy's."""
        if not self._leases.orders(request):
            self.end_all(self._policy.replaced_at_end(request, now), PinEnd.RELEASED, now)
            return self._policy.on_turn_end(request, now)
        self._policy.on_request_gone(request, now)
        return self._leases.begin(request, now)

    def all(self) -> list[Pin]:
        """All pins that are held, leases too."""
        return [*self._policy.pins(), *self._leases.pins()]

    def next_due_s(self) -> float | None:
        """When the next pin ends by time; None if none does."""
        deadlines = (self._policy.next_due_s(), self._leases.next_due_s())
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def hold(self, request: Request, pin: Pin, now: float) -> None:
        """Pin the blocks of a request that ends."""
        is_whole = self._kv.pin(request, pin.pin_id, pin.num_prefix_blocks)
        pin.num_blocks = self._kv.pinned.num_blocks_of(pin.pin_id)
        self._held_since_s[pin.pin_id] = now
        if self.recorder is not None:
            self.recorder.placed(pin)
        num_wanted = pin.num_prefix_blocks if pin.num_wanted_blocks is None else pin.num_wanted_blocks
        if not is_whole or num_wanted < pin.num_prefix_blocks:
            num_kept = self._kv.pinned.longest_cut(pin.held_hashes, num_wanted)
            cause = PinEnd.RELEASED if is_whole else PinEnd.REVOKED
            self._cut_tail(pin, num_kept, cause, now, request.request_id)

    def expire(self, now: float) -> None:
        """End the pins that are due, and unpin superseded blocks."""
        for stale in self._policy.take_superseded():
            self._evict_first(stale, now)
        for pin, cause in self._policy.due(now):
            self._end(pin, cause, now)
        if self._leases:
            for pin, cause in self._leases.due(now):
                self._end(pin, cause, now)

    def after_signal(self, now: float) -> None:
        """Record the deadlines that a signal has moved, and end the pins that are due."""
        if self.recorder is not None:
            self.recorder.compare_deadlines()
        self.expire(now)

    def end_all(self, pins: Iterable[Pin], cause: PinEnd, now: float, by: str | None = None) -> None:
        """End these pins for the same cause, for request ``by`` if they were revoked."""
        for pin in pins:
            self._end(pin, cause, now, by)

    def take_superseded(self) -> int:
        """Blocks superseded since the last call that were not referenced elsewhere."""
        num_blocks = self._num_superseded_blocks
        self._num_superseded_blocks = 0
        return num_blocks

    def take_ended(self) -> dict[str, int]:
        """How many pins have ended since the last call, by cause."""
        ended = self._num_ended
        self._num_ended = {}
        return ended

    def take_block_s(self) -> dict[str, float]:
        """Blocks times seconds of the pins that ended since the last call, in part or whole, by cause."""
        block_s = self._block_s
        self._block_s = {}
        return block_s

    def take_held_s(self) -> dict[str, list[float]]:
        """How long each pin that ended since the last call was held, by cause."""
        held_s = self._held_s
        self._held_s = {}
        return {cause: list(seconds) for cause, seconds in held_s.items()}

    def cannot_make_fit(self, request: Request, now: float) -> bool:
        """Whether the request lacks more blocks than all pins that may be revoked for it have."""
        missing = self._kv.min_missing_blocks(request)
        if missing > 0 and self._kv.num_pins:
            for pin in self._revocable_for(request, now, last_resort=False):
                missing -= pin.num_blocks
                if missing <= 0:
                    return False
        return missing > 0

    def revoke_until_fits(
        self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock], now: float, *, runs_alone: bool
    ) -> bool:
        """Revoke pins, tails first, until the request fits with ``num_tokens``; False if it cannot.

        Any pin may be revoked if nothing else runs (``runs_alone``) and nothing is being loaded. A request
        that is being loaded will run or free its blocks, so the caller waits for it first.
        """
        if not self._kv.num_pins:
            return False
        if runs_alone and not self._loads.num_requests and not self._loads.num_in_flight:
            return self._revoke_one_by_one(request, num_tokens, hit, now)
        return self._revoke_if_enough(request, num_tokens, hit, now)

    def _revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterable[Pin]:
        """The policy's pins that may be revoked, then leases."""
        pins = self._policy.revocable_for(requester, now, last_resort)
        return chain(pins, self._leases.revocable_for(requester, last_resort)) if self._leases else pins

    def _revoke_one_by_one(
        self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock], now: float
    ) -> bool:
        """Revoke until the request fits, as nothing else can run.

        Two pins may share the blocks that are missing, so what is freed cannot be added up beforehand.
        """
        for pin in list(self._revocable_for(request, now, last_resort=True)):
            if self._kv.num_states_short(request, hit) > 0:
                self._end(pin, PinEnd.REVOKED, now, request.request_id)
            else:
                wanted = self._kv.num_blocks_short(request, num_tokens, hit)
                self._shrink(pin, wanted, now, request.request_id)
            if self._kv.fits(request, num_tokens, hit):
                return True
        return False

    def _revoke_if_enough(
        self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock], now: float
    ) -> bool:
        """Revoke only if that frees enough blocks: first add up what it would free."""
        if self._kv.num_states_short(request, hit) > 0:
            return self._revoke_for_states(request, num_tokens, hit, now)
        missing = self._kv.num_blocks_short(request, num_tokens, hit)
        revoked: list[tuple[Pin, int]] = []
        for pin in self._revocable_for(request, now, last_resort=False):
            _, num_freed = self._kv.pinned.cut_to_free(pin.pin_id, pin.held_hashes, missing)
            if num_freed:
                revoked.append((pin, num_freed))
                missing -= num_freed
            if missing <= 0:
                break
        if missing > 0:
            return False
        for pin, num_freed in revoked:
            self._shrink(pin, num_freed, now, request.request_id)
        # Blocks of a revoked pin that the request hit are free now, yet needed: measure, don't assume.
        return self._kv.num_blocks_short(request, num_tokens, hit) <= 0

    def _revoke_for_states(
        self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock], now: float
    ) -> bool:
        """Revoke whole pins, each with its state, if that frees enough states and blocks."""
        num_states = self._kv.num_states_short(request, hit)
        num_blocks = self._kv.num_blocks_short(request, num_tokens, hit)
        revoked: list[Pin] = []
        for pin in self._revocable_for(request, now, last_resort=False):
            num_freed, frees_state = self._kv.pinned.freed_by_end(pin.pin_id)
            if (frees_state and num_states > 0) or (num_freed and num_blocks > 0):
                revoked.append(pin)
                num_states -= frees_state
                num_blocks -= num_freed
            if num_states <= 0 >= num_blocks:
                break
        else:
            return False
        self.end_all(revoked, PinEnd.REVOKED, now, request.request_id)
        return self._kv.fits(request, num_tokens, hit)

    def _evict_first(self, stale: StalePrefix, now: float) -> None:
        """Let blocks that are not referenced elsewhere, and all offloaded ones, be evicted first."""
        self._cut(stale, now)
        self._num_superseded_blocks += self._kv.evict_first(stale.block_hashes)
        self._loads.superseded(stale.block_hashes)

    def _cut(self, stale: StalePrefix, now: float) -> None:
        """Take the stale blocks off their pin, if that has not ended and still holds any of them."""
        pin = stale.pin
        if pin is None or pin.pin_id not in self._held_since_s:
            return
        if pin.num_prefix_blocks > stale.num_kept_blocks:
            num_kept = self._kv.pinned.longest_cut(pin.held_hashes, stale.num_kept_blocks)
            self._cut_tail(pin, num_kept, PinEnd.SUPERSEDED, now, stale.by)

    def _shrink(self, pin: Pin, wanted: int, now: float, by: str) -> None:
        """Cut blocks off the pin's tail until ``wanted`` are free, or end it."""
        num_kept, _ = self._kv.pinned.cut_to_free(pin.pin_id, pin.held_hashes, wanted)
        self._cut_tail(pin, num_kept, PinEnd.REVOKED, now, by)

    def _cut_tail(self, pin: Pin, num_kept: int, cause: PinEnd, now: float, by: str) -> None:
        """Cut a pin to its first ``num_kept`` blocks of tokens, for request ``by``; without any it ends."""
        if num_kept <= 0:
            self._end(pin, cause, now, by)
            return
        num_blocks = self._kv.pinned.shrink(pin.pin_id, pin.held_hashes, num_kept)
        pin.num_blocks -= num_blocks
        pin.num_prefix_blocks = num_kept
        self._count(pin, num_blocks, cause, now)
        if self._leases.holds(pin):
            self._leases.shrunk(pin)
        else:
            self._policy.on_pin_shrunk(pin, num_blocks, cause, now, by)
        if self.recorder is not None:
            self.recorder.cut(pin, cause, by)

    def _end(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        pin.num_needed_blocks = self._kv.pinned.end(pin.pin_id)
        if self._leases.holds(pin):
            self._leases.ended(pin)
        else:
            self._policy.on_pin_ended(pin, cause, now, by)
        if self.recorder is not None:
            self.recorder.ended(pin, cause, by)
        self._num_ended[cause] = self._num_ended.get(cause, 0) + 1
        self._count(pin, pin.num_blocks, cause, now)
        held_s = now - self._held_since_s.pop(pin.pin_id)
        self._held_s.setdefault(cause, deque(maxlen=MAX_KEPT)).append(held_s)

    def _count(self, pin: Pin, num_blocks: int, cause: PinEnd, now: float) -> None:
        held_s = now - self._held_since_s[pin.pin_id]
        self._block_s[cause] = self._block_s.get(cause, 0.0) + num_blocks * held_s

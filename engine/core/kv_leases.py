"""KV that is leased out: computed here for another server, which reads it and goes on.

A lease is a pin of the same ledger. It is held until the reader has the blocks or its time has passed, may be
renewed, and is revoked where nothing else can run. To the pin manager the policy's pins and the leases are
those of one policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, count, takewhile

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.outputs import ModelRunnerOutput, NewKVLease, SchedulerOutput
from engine.core.policy import Pin, PinEnd, RetentionPolicy, SchedulingPolicy, StalePrefix
from engine.core.request import Request
from engine.kv_transfer.messages import KVLeased, KVLeaseOrder

MOST_OF_POOL = 0.5
"""How much of the pool one tenant's leases may keep from others."""


class KVLeases(RetentionPolicy):
    """A policy's pins and the leases, as the pin manager asks for them."""

    def __init__(self, policy: SchedulingPolicy, kv: KVCacheManager) -> None:
        self._policy = policy
        self._kv = kv
        self._ids = count(-1, -1)
        """Policies number their pins upwards."""
        self._pins: dict[int, Pin] = {}
        """Leases that are held, in the order of their deadlines: all are held for equally long."""
        self._orders: dict[int, KVLeaseOrder] = {}
        self._tenants: dict[int, str] = {}
        self._by_lease_id: dict[str, Pin] = {}
        self._released: dict[int, Pin] = {}
        """Leases that have been read, or given back unread, or have lost a part."""
        self._told: set[int] = set()
        """Leases that the worker and the client were told of."""
        self._new: list[NewKVLease] = []
        self._ended: list[str] = []

    # ---- a lease ----

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        """The policy's pin; of a turn that goes on elsewhere, where its job is, only a lease."""
        order = request.kv_transfer
        if not isinstance(order, KVLeaseOrder):
            return self._policy.on_turn_end(request, now)
        self._policy.on_request_gone(request, now)
        return self._begin(order, request, now)

    def _begin(self, order: KVLeaseOrder, request: Request, now: float) -> Pin | None:
        """The pin of a turn whose KV was ordered; None if it has no full block."""
        num_tokens = min(request.num_computed_tokens, request.num_tokens)
        hashes = request.block_hashes[: num_tokens // self._kv.block_size]
        if not hashes:
            return None
        pin = Pin(next(self._ids), "", request.request_id, hashes, now + order.lease_s)
        # The reader computes at least the last token of the prompt.
        pin.num_wanted_blocks = (request.num_prompt_tokens - 1) // self._kv.block_size
        self._pins[pin.pin_id] = pin
        self._orders[pin.pin_id], self._tenants[pin.pin_id] = order, request.tenant
        self._by_lease_id[order.lease_id] = pin
        return pin

    def told(self, request: Request, pin: Pin | None) -> KVLeased | None:
        """What the client is told of the lease that this pin of its request is; the worker is told, too.

        None if its request ordered none.
        """
        order = request.kv_transfer
        if not isinstance(order, KVLeaseOrder):
            return None
        if pin is None or pin.pin_id not in self._pins:
            return KVLeased(order.lease_id, 0, [])
        blocks = self._kv.pinned.named_blocks_of(pin.pin_id, pin.held_hashes)
        self._told.add(pin.pin_id)
        self._new.append(NewKVLease(order.lease_id, blocks))
        num_tokens = pin.num_prefix_blocks * self._kv.block_size
        return KVLeased(order.lease_id, num_tokens, _by_group(blocks, len(pin.block_hashes[0])))

    def update_from_output(self, result: ModelRunnerOutput, now: float) -> None:
        """Take in what readers have said: those that are done, and those that need more time."""
        for lease_id in result.renewed_kv_leases:
            pin = self._by_lease_id.get(lease_id)
            if pin is not None:
                pin.deadline_s = now + self._orders[pin.pin_id].lease_s
                self._pins[pin.pin_id] = self._pins.pop(pin.pin_id)
        for lease_id in result.released_kv_leases:
            pin = self._by_lease_id.get(lease_id)
            if pin is not None:
                self._released[pin.pin_id] = pin

    def requests_of(self, lease_ids: Iterable[str]) -> list[str]:
        """Ids of the requests whose KV is leased out under these ids; without leases that have ended."""
        pins = map(self._by_lease_id.get, lease_ids)
        return [pin.request_id for pin in pins if pin is not None]

    # ---- the worker ----

    @property
    def has_news(self) -> bool:
        """Whether the worker is to be told of leases, by an empty plan if there is nothing to run."""
        return bool(self._new or self._ended)

    def __len__(self) -> int:
        """Leases that are held."""
        return len(self._pins)

    def fill_in(self, plan: SchedulerOutput) -> None:
        """Add the leases that have begun and those that have ended to a plan."""
        if self._new:
            plan.kv_leases, self._new = self._new, []
        if self._ended:
            plan.ended_kv_leases, self._ended = self._ended, []

    # ---- what the pin manager asks ----

    def revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        """The policy's pins, and behind them leases: all where nothing else runs, else those of other tenants
        that have leased out more than half of the pool."""
        pins = self._policy.revocable_for(requester, now, last_resort)
        if not self._pins:
            return pins
        return chain(pins, list(self._pins.values()) if last_resort else self._excess_for(requester))

    def _excess_for(self, requester: Request) -> list[Pin]:
        held = Counter[str]()
        for pin in self._pins.values():
            held[self._tenants[pin.pin_id]] += pin.num_blocks
        most = self._kv.pool.num_usable_blocks * MOST_OF_POOL
        greedy = {tenant for tenant, num_blocks in held.items() if num_blocks > most} - {requester.tenant}
        return [pin for pin in self._pins.values() if self._tenants[pin.pin_id] in greedy]

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        yield from self._policy.due(now)
        if not self._pins:
            return
        yield from [(pin, PinEnd.RELEASED) for pin in self._released.values()]
        expired = list(takewhile(lambda pin: pin.deadline_s <= now, self._pins.values()))
        yield from [(pin, PinEnd.EXPIRED) for pin in expired]

    def next_due_s(self) -> float | None:
        due_s, first = self._policy.next_due_s(), next(iter(self._pins.values()), None)
        if first is None:
            return due_s
        return first.deadline_s if due_s is None else min(due_s, first.deadline_s)

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        if self._pins.pop(pin.pin_id, None) is None:
            self._policy.on_pin_ended(pin, cause, now, by)
            return
        self._released.pop(pin.pin_id, None)
        self._tell_end(pin)
        del self._by_lease_id[self._orders.pop(pin.pin_id).lease_id], self._tenants[pin.pin_id]

    def _tell_end(self, pin: Pin) -> None:
        """Tell the worker, if it was told of the lease, with the plan that may overwrite the blocks.

        Of one whose beginning it has not heard of yet it only hears the end.
        """
        if pin.pin_id in self._told:
            self._told.discard(pin.pin_id)
            lease_id = self._orders[pin.pin_id].lease_id
            self._new = [lease for lease in self._new if lease.lease_id != lease_id]
            self._ended.append(lease_id)

    def on_pin_shrunk(
        self, pin: Pin, num_blocks_lost: int, cause: PinEnd, now: float, by: str | None = None
    ) -> None:
        if pin.pin_id not in self._pins:
            self._policy.on_pin_shrunk(pin, num_blocks_lost, cause, now, by)
        elif pin.pin_id in self._told:  # its reader would miss what is lost: to it all is gone
            self._tell_end(pin)
            self._released[pin.pin_id] = pin

    def take_superseded(self) -> Iterable[StalePrefix]:
        return self._policy.take_superseded()

    def pins(self) -> Iterable[Pin]:
        return [*self._policy.pins(), *self._pins.values()]


def _by_group(blocks: dict[BlockHash, int], hash_length: int) -> list[list[int]]:
    """Ids of the blocks, one list for each ending of their names: that of a group of layers."""
    groups: dict[bytes, list[int]] = {}
    for name, block_id in blocks.items():
        groups.setdefault(name[hash_length:], []).append(block_id)
    return list(groups.values())

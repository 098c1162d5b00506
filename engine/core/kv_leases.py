"""Leases of KV that is computed here for another server, which reads it and continues.

A lease is a pin that belongs to this module, as the other pins belong to the policy. It is held until the
reader has the blocks or its time has passed, and may be renewed. It is revoked where nothing else can run, or
where its tenant has leased out too much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import count, takewhile

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.outputs import ModelRunnerOutput, NewKVLease, SchedulerOutput
from engine.core.parts import SchedulerPart
from engine.core.policy import Pin, PinEnd
from engine.core.request import Request
from engine.records.kv_transfer import KVLeased, KVLeaseOrder

MOST_OF_POOL = 0.5
"""Share of the pool that one tenant's leases may keep from others."""


class KVLeases(SchedulerPart):
    """The leases that are held, and what the worker and the readers report of them."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._ids = count(-1, -1)
        """Negative ids, as policies number their pins upwards."""
        self._pins: dict[int, Pin] = {}
        """Leases that are held, in the order of their deadlines: all are held for equally long."""
        self._orders: dict[int, KVLeaseOrder] = {}
        self._tenants: dict[int, str] = {}
        self._by_lease_id: dict[str, Pin] = {}
        self._released: dict[int, Pin] = {}
        """Leases that have been read, or given back unread, or have lost a part."""
        self._told: set[int] = set()
        """Leases that were reported to the worker and the client."""
        self._new: list[NewKVLease] = []
        self._ended: list[str] = []

    # ---- a lease ----

    def orders(self, request: Request) -> bool:
        """Whether the request's client ordered a lease: its job continues on another server."""
        return isinstance(request.kv_transfer, KVLeaseOrder)

    def begin(self, request: Request, now: float) -> Pin | None:
        """The lease of a turn that has ended; None if the turn has no full block."""
        order = request.kv_transfer
        assert isinstance(order, KVLeaseOrder)
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
        """Report the lease that this pin is: to the worker with the next plan, to the client as returned.

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

    def take(self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        """Apply the readers' reports: release the leases that were read, renew those that need more time."""
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
        """Ids of the requests whose KV is leased out under these ids; leases that have ended are left out."""
        pins = map(self._by_lease_id.get, lease_ids)
        return [pin.request_id for pin in pins if pin is not None]

    # ---- the worker ----

    @property
    def has_news(self) -> bool:
        """Whether the next plan must report leases to the worker, even if it is empty."""
        return bool(self._new or self._ended)

    def __len__(self) -> int:
        """The number of leases that are held."""
        return len(self._pins)

    def fill(self, plan: SchedulerOutput, requests: Mapping[str, Request], now: float) -> None:
        """Add the leases that have begun and those that have ended to a plan."""
        if self._new:
            plan.kv_leases = self._new
            self._new = []
        if self._ended:
            plan.ended_kv_leases = self._ended
            self._ended = []

    # ---- what the pin manager asks ----

    def holds(self, pin: Pin) -> bool:
        """Whether this pin is a lease that is held."""
        return pin.pin_id in self._pins

    def pins(self) -> Iterable[Pin]:
        """All leases that are held."""
        return self._pins.values()

    def revocable_for(self, requester: Request, last_resort: bool) -> list[Pin]:
        """Leases that may be revoked for this requester: all if nothing else runs, else those of other
        tenants that have leased out more than half of the pool."""
        return list(self._pins.values()) if last_resort else self._excess_for(requester)

    def _excess_for(self, requester: Request) -> list[Pin]:
        held = Counter[str]()
        for pin in self._pins.values():
            held[self._tenants[pin.pin_id]] += pin.num_blocks
        most = self._kv.pool.num_usable_blocks * MOST_OF_POOL
        greedy = {tenant for tenant, num_blocks in held.items() if num_blocks > most} - {requester.tenant}
        return [pin for pin in self._pins.values() if self._tenants[pin.pin_id] in greedy]

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        """Leases that end now: those that were read or given back, then those past their deadline."""
        yield from [(pin, PinEnd.RELEASED) for pin in self._released.values()]
        expired = list(takewhile(lambda pin: pin.deadline_s <= now, self._pins.values()))
        yield from [(pin, PinEnd.EXPIRED) for pin in expired]

    def next_due_s(self) -> float | None:
        """The first deadline; None without leases."""
        first = next(iter(self._pins.values()), None)
        return None if first is None else first.deadline_s

    def ended(self, pin: Pin) -> None:
        """A lease has ended."""
        del self._pins[pin.pin_id]
        self._released.pop(pin.pin_id, None)
        self._tell_end(pin)
        del self._by_lease_id[self._orders.pop(pin.pin_id).lease_id], self._tenants[pin.pin_id]

    def _tell_end(self, pin: Pin) -> None:
        """Report the end of a reported lease to the worker, with the plan that may overwrite the blocks.

        If its beginning has not been sent yet, only its end is.
        """
        if pin.pin_id in self._told:
            self._told.discard(pin.pin_id)
            lease_id = self._orders[pin.pin_id].lease_id
            self._new = [lease for lease in self._new if lease.lease_id != lease_id]
            self._ended.append(lease_id)

    def shrunk(self, pin: Pin) -> None:
        """A lease has lost blocks. If it was reported, the whole lease ends: its reader would miss them."""
        if pin.pin_id in self._told:
            self._tell_end(pin)
            self._released[pin.pin_id] = pin


def _by_group(blocks: dict[BlockHash, int], hash_length: int) -> list[list[int]]:
    """Block ids, one list per group of layers, which the end of a block's name identifies."""
    groups: dict[bytes, list[int]] = {}
    for name, block_id in blocks.items():
        groups.setdefault(name[hash_length:], []).append(block_id)
    return list(groups.values())

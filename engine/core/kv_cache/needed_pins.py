"""Estimates which pinned blocks an LRU pool would have evicted by now: what a pin was needed for.

Without their pin, these blocks would be free, and evicted before all that become free later. When one of
those is evicted, LRU would have taken a pinned block instead. Each such eviction is charged once, to the
oldest pin that has blocks left, so that all pins together are charged what a pool without pins would have
lost. What requests lacked counts as well: LRU would have evicted for them. This is a first-order estimate: it
leaves out that lost blocks must be recomputed, which evicts others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    number: int
    num_blocks: int
    num_needed: int = 0


class NeededPins:
    """Tracks the pins of one pool."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        """Pins in the order in which they began, which is that of their numbers."""

    def __bool__(self) -> bool:
        return bool(self._held)

    def begin(self, pin_id: int, number: int, num_blocks: int) -> None:
        """Begin a pin of ``num_blocks`` blocks, the ``number``-th of all pins."""
        self._held[pin_id] = _Held(number, num_blocks)

    def evicted(self, pins_before: Sequence[int]) -> None:
        """Charge the eviction of free blocks, the longest free first. ``pins_before``: how many pins had
        begun when each of them became free."""
        left = iter(self._held.values())
        pin = next(left, None)
        for number in pins_before:
            while pin is not None and pin.num_needed >= pin.num_blocks:
                pin = next(left, None)
            if pin is None:
                return
            if pin.number <= number:
                pin.num_needed += 1

    def short_of(self, num_blocks: int) -> None:
        """Charge at least ``num_blocks``, which a request lacks, to the oldest pins."""
        for pin in self._held.values():
            if num_blocks <= 0:
                return
            pin.num_needed = max(pin.num_needed, min(num_blocks, pin.num_blocks))
            num_blocks -= pin.num_blocks

    def cut(self, pin_id: int, num_left: int) -> None:
        """Cut a pin to its first ``num_left`` blocks, which LRU would have evicted last."""
        pin = self._held.get(pin_id)
        if pin is not None:
            pin.num_blocks = num_left
            pin.num_needed = min(pin.num_needed, num_left)

    def end(self, pin_id: int) -> int | None:
        """End a pin; returns how many of its blocks LRU would have evicted, None if it is not known here."""
        pin = self._held.pop(pin_id, None)
        return None if pin is None else min(pin.num_needed, pin.num_blocks)

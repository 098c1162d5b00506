"""Records changes of pins, for publication."""

from __future__ import annotations

import math

from engine.core.policy import Pin, PinEnd
from engine.records.kv_events import PinChanged, PinEnded, PinEvent, PinPlaced, event_hash


class PinRecorder:
    """Events of pins in the order in which they happened."""

    def __init__(self, block_size: int, wall_offset_s: float) -> None:
        """``wall_offset_s``: by how many seconds the wall clock is ahead of the scheduler's clock."""
        self._block_size = block_size
        self._wall_offset_s = wall_offset_s
        self._events: list[PinEvent] = []
        self._told: dict[int, tuple[Pin, float]] = {}
        """Every live pin, and its deadline as last recorded."""

    def placed(self, pin: Pin) -> None:
        """Record that the pin holds its blocks now."""
        self._told[pin.pin_id] = pin, pin.deadline_s
        self._events.append(
            PinPlaced(
                pin.pin_id,
                pin.job_id,
                pin.request_id,
                event_hash(pin.held_hashes[-1]),
                pin.num_prefix_blocks * self._block_size,
                pin.num_blocks,
                self._held_until(pin),
            )
        )

    def cut(self, pin: Pin, cause: PinEnd, by: str | None) -> None:
        """Record that the pin has lost its last blocks."""
        self._changed(pin, cause.value, by)

    def ended(self, pin: Pin, cause: PinEnd, by: str | None) -> None:
        """Record that the pin holds nothing any more."""
        del self._told[pin.pin_id]
        self._events.append(PinEnded(pin.pin_id, pin.job_id, cause.value, by))

    def compare_deadlines(self) -> None:
        """Record the deadlines that the policy has moved, as it does not report this."""
        moved = [pin for pin, deadline_s in self._told.values() if pin.deadline_s != deadline_s]
        for pin in moved:
            self._changed(pin, None, None)

    def take(self) -> list[PinEvent]:
        """The events since the last call."""
        events = self._events
        self._events = []
        return events

    def _changed(self, pin: Pin, reason: str | None, by: str | None) -> None:
        self._told[pin.pin_id] = pin, pin.deadline_s
        self._events.append(
            PinChanged(
                pin.pin_id,
                pin.job_id,
                event_hash(pin.held_hashes[-1]),
                pin.num_prefix_blocks * self._block_size,
                pin.num_blocks,
                self._held_until(pin),
                reason,
                by,
            )
        )

    def _held_until(self, pin: Pin) -> float | None:
        """Wall time of its deadline; None if it has none."""
        return pin.deadline_s + self._wall_offset_s if math.isfinite(pin.deadline_s) else None

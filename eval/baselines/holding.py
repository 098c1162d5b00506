"""The base of policies that pin a turn's KV for its program's next turn; subclasses decide how long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from continuum.jobs.job import BranchTip, Turn
from continuum.retention.pins import PinTable
from engine.core.policy import Pin, PinEnd, PolicyContext
from engine.core.request import Request
from engine.records.messages import ToolCall
from eval.baselines.program import ProgramPolicy

GRACE_S = 1.0
"""Time to live of a pin until the API server has reported which tool was called."""


class RetainingPolicy(ProgramPolicy):
    """Pins the blocks of an ended turn for ``ttl_s`` seconds, and hands them over to the program's next turn.

    Only the progress valve (nothing runs, the head of the queue does not fit) revokes a pin, unless the
    subclass decides otherwise, and always as a whole: the published policies have no partial pins.
    """

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._context = context
        self._pins = PinTable(context.num_countable_blocks, 1.0)
        self._num_pins = 0

    def ttl_s(self, tip: BranchTip, request: Request | None, now: float) -> float:
        """Returns the seconds to pin from the end of the turn, 0 for no pin; ``request`` is None when it is
        called again because the tools are reported."""
        raise NotImplementedError

    def hold(self, tip: BranchTip, request: Request, now: float) -> Pin | None:
        block_hashes = request.block_hashes[: len(tip.chain)]
        ttl_s = self.ttl_s(tip, request, now) if block_hashes else 0.0
        if ttl_s <= 0:
            return None
        self._num_pins += 1
        num_blocks = self._context.blocks_of_pin(len(block_hashes))
        pin = Pin(self._num_pins, tip.job.job_id, tip.request_id, block_hashes, now + ttl_s, num_blocks)
        self._pins.add(pin, tip)
        return pin

    def tools_known(self, tip: BranchTip, calls: Sequence[ToolCall], now: float) -> None:
        if tip.pin is not None:
            self._pins.set_deadline(tip.pin, tip.ended_s + self.ttl_s(tip, None, now))

    def gap_over(self, turn: Turn, tip: BranchTip, gap_s: float, now: float) -> None:
        if tip.pin is not None:
            self._pins.claim(tip.pin)

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        super().on_admitted(request, now)
        turn = self._turns.get(request.request_id)
        return (turn.pin,) if turn is not None and turn.pin is not None else ()

    def _close(self, request: Request, now: float) -> Turn | None:
        turn = super()._close(request, now)
        if turn is not None and turn.tip is not None:
            self._release(turn.tip)
        return turn

    def drop(self, tip: BranchTip) -> None:
        super().drop(tip)
        self._release(tip)

    def _release(self, tip: BranchTip) -> None:
        if tip.pin is not None:
            self._pins.release(tip.pin)

    def revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        if last_resort:
            yield from self.pins_to_break(requester)

    def pins_to_break(self, requester: Request) -> Iterator[Pin]:
        """Yields all pins, the youngest program's first; the requester's own, which it will read, last."""
        turn = self._turns.get(requester.request_id)
        own = turn.pin if turn is not None else None
        yield from (pin for pin in self._pins.youngest_first() if pin is not own)
        if own is not None:
            yield own

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        return self._pins.due(now)

    def next_due_s(self) -> float | None:
        return self._pins.next_due_s()

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        tip = self._pins.ended(pin, cause)
        waiting = (turn for turn in tip.job.turns.values() if turn.tip is tip)
        self._changed.extend(turn.request for turn in waiting if turn.num_cached_tokens is None)

    def on_pin_shrunk(
        self, pin: Pin, num_blocks_lost: int, cause: PinEnd, now: float, by: str | None = None
    ) -> None:
        self._pins.shrunk(pin, num_blocks_lost)
        self._pins.release(pin, PinEnd.REVOKED)

    def pins(self) -> Iterable[Pin]:
        return self._pins

"""A pin while its trace is being read, and the decisions before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from eval.trace.analysis.jobs import PinDecision, PinLife, PinOutcome, Shrink
from tracing.events import PinEvent


@dataclass(slots=True, eq=False)
class _OpenPin:
    created: PinEvent
    decisions: list[PinDecision]
    deadline_s: float | None
    num_blocks: int
    since_s: float
    """When it last shrank, or began."""
    block_s: float = 0.0
    shrinks: list[Shrink] = field(default_factory=list)

    def shrink(self, event: PinEvent) -> None:
        self._count_until(event.now)
        self.num_blocks -= event.num_blocks
        outcome = PinOutcome.REVOKED if event.cause is None else PinOutcome(event.cause)
        self.shrinks.append(Shrink(event.now, event.num_blocks, event.by, outcome))

    def _count_until(self, now: float) -> None:
        self.block_s += self.num_blocks * max(0.0, now - self.since_s)
        self.since_s = now

    def close(
        self, now: float, outcome: PinOutcome, by: str | None = None, needed_blocks: int | None = None
    ) -> PinLife:
        self._count_until(now)
        created = self.created
        return PinLife(
            pin_id=created.pin_id,
            job_id=created.job_id,
            req_id=created.req_id,
            began_s=created.now,
            num_blocks=created.num_blocks,
            deadline_s=self.deadline_s,
            decisions=tuple(self.decisions),
            shrinks=tuple(self.shrinks),
            ended_s=now,
            outcome=outcome,
            revoked_by=by,
            refused_for=created.reason if outcome is PinOutcome.REFUSED else None,
            block_s=self.block_s,
            blocks_at_end=self.num_blocks,
            needed_blocks=needed_blocks,
        )


class PinReader:
    """Assembles the events of each pin; passes on each pin when it has ended."""

    def __init__(self, on_pin: Callable[[PinLife], None]) -> None:
        self._on_pin = on_pin
        self._open: dict[int, _OpenPin] = {}
        self._decided: list[PinDecision] = []
        """Decisions about a tip that has no pin yet."""
        self._decided_for: str | None = None

    def take(self, event: PinEvent) -> None:
        match event.kind:
            case "decided":
                self._decide(event)
            case "created" if event.pin_id is not None:
                decisions = self._take_decisions(event.req_id)
                self._open[event.pin_id] = _OpenPin(
                    event, decisions, event.deadline_s, event.num_blocks, event.now
                )
            case "refused":
                pin = _OpenPin(event, self._take_decisions(event.req_id), None, 0, event.now)
                self._on_pin(pin.close(event.now, PinOutcome.REFUSED))
            case "shrunk" if event.pin_id in self._open:
                self._open[event.pin_id].shrink(event)
            case "ended" if event.pin_id in self._open:
                pin = self._open.pop(event.pin_id)
                pin.deadline_s = event.deadline_s
                outcome = PinOutcome(event.cause) if event.cause is not None else PinOutcome.RELEASED
                revoked_by = event.by if outcome is PinOutcome.REVOKED else None
                self._on_pin(pin.close(event.now, outcome, revoked_by, event.needed_blocks))
            case _:  # of a pin that began before the trace
                pass

    def _decide(self, event: PinEvent) -> None:
        decision = PinDecision(
            now=event.now,
            ttl_s=event.ttl_s or 0.0,
            rule=event.rule or "",
            reason=event.reason or "",
            inputs=event.inputs,
        )
        pin = self._open.get(event.pin_id) if event.pin_id is not None else None
        if pin is not None:
            pin.decisions.append(decision)
            return
        if self._decided_for != event.req_id:
            self._decided_for = event.req_id
            self._decided = []
        self._decided.append(decision)

    def _take_decisions(self, req_id: str) -> list[PinDecision]:
        """Returns the decisions just made about this tip."""
        decided = self._decided if self._decided_for == req_id else []
        self._decided_for = None
        self._decided = []
        return decided

    def close(self, now: float) -> None:
        """Ends the trace: passes on open pins as they are."""
        for pin in self._open.values():
            self._on_pin(pin.close(max(now, pin.since_s), PinOutcome.OPEN))
        self._open.clear()

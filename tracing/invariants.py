"""Rules that the records of any trace follow; docs/trace.md lists them, too.

A check follows the events and reports each fault in a sentence. After a gap, or if a trace begins midway, it
does not know what came before, and starts over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tracing.events import (
    GrammarReady,
    JobEvent,
    PauseEvent,
    PinEvent,
    PrefixCacheEvent,
    RequestArrived,
    RequestsEnded,
    SignalEvent,
    StepDecision,
    StepOutput,
    StepSnapshot,
    TraceEnd,
    TraceEvent,
    TraceGap,
    TraceHeader,
)
from tracing.header_limits import not_told
from tracing.reader import UNTIMED

JOB_KINDS = (
    "turn_arrived", "turn_parked", "turn_admitted", "turn_ended", "turn_aborted", "tools_started", "finished",
    "forgotten", "reported_started", "reported_progress", "reported_finished", "reported_cancelled",
)  # fmt: skip
SIGNAL_KINDS = ("tool_gap_started", "tool_signal", "job_finished", "model_learned")
SIGNAL_STATES = ("started", "progress", "finished", "cancelled")
ENDED_HOW = ("stopped", "aborted", "error")
ENDED_BY = ("stop", "length", "error")
PAUSE_STATES = ("unpaused", "paused_new", "paused_all")
PIN_KINDS = ("created", "decided", "refused", "shrunk", "ended")
PIN_CAUSES = ("handed_over", "expired", "revoked", "released", "superseded")
TELL_OF_PINS = ("continuum", "known-work", "oracle")
"""Policies that record their decisions on pins and jobs; for others only steps show pins."""


class Check(Protocol):
    """One rule."""

    def faults(self, event: TraceEvent) -> Iterator[str]:
        """Yields a sentence for each fault of this event; called for every event, in order."""

    def forget(self) -> None:
        """Resets the check, because events are missing here."""


class Times:
    """Checks that times never run backwards."""

    def __init__(self) -> None:
        self._last_s: float | None = None

    def forget(self) -> None:
        pass

    def faults(self, event: TraceEvent) -> Iterator[str]:
        if isinstance(event, UNTIMED):
            return
        if self._last_s is not None and event.now < self._last_s:
            yield f"now is {event.now}, but the record before it is of {self._last_s}"
        self._last_s = event.now


class Words:
    """Checks that a kind or a state has one of its known values; those of pins are checked with their pin."""

    def forget(self) -> None:
        pass

    def faults(self, event: TraceEvent) -> Iterator[str]:
        match event:
            case JobEvent():
                yield from _not_among("kind", event.kind, JOB_KINDS)
            case SignalEvent():
                yield from _not_among("kind", event.kind, SIGNAL_KINDS)
                if event.state is not None:
                    yield from _not_among("state", event.state, SIGNAL_STATES)
            case RequestsEnded():
                yield from _not_among("how", event.how, ENDED_HOW)
            case PauseEvent():
                yield from _not_among("state", event.state, PAUSE_STATES)
            case StepOutput():
                for word in event.ended.values():
                    yield from _not_among("ended", word, ENDED_BY)


def _not_among(field: str, word: str, known: tuple[str, ...]) -> Iterator[str]:
    if word not in known:
        yield f"{field} is {word!r}, which is none of {', '.join(known)}"


class Steps:
    """Checks that steps are numbered without gaps; each is a snapshot, its events, and its decision."""

    def __init__(self) -> None:
        self._snapshot: StepSnapshot | None = None
        self._last: int | None = None
        self._max_num_seqs = 0

    def forget(self) -> None:
        self._snapshot = self._last = None

    def faults(self, event: TraceEvent) -> Iterator[str]:
        match event:
            case TraceHeader():
                self._max_num_seqs = event.max_num_seqs
            case StepSnapshot():
                yield from self._begun(event)
            case PrefixCacheEvent() if self._snapshot is not None and event.step != self._snapshot.step:
                yield f"step is {event.step}, but this is step {self._snapshot.step}"
            case StepDecision():
                yield from self._decided(event)
                self._snapshot = None
            case StepOutput() if self._last is not None and event.step > self._last:
                yield f"step is {event.step}, but the last one that was decided is {self._last}"

    def _begun(self, snapshot: StepSnapshot) -> Iterator[str]:
        if self._snapshot is not None:
            yield f"step {self._snapshot.step} has no decision"
        if self._last is not None and snapshot.step != self._last + 1:
            yield f"step is {snapshot.step}, but {self._last + 1} is next"
        if self._max_num_seqs and len(snapshot.running) > self._max_num_seqs:
            yield f"{len(snapshot.running)} requests run, but max_num_seqs is {self._max_num_seqs}"
        self._snapshot = snapshot
        self._last = snapshot.step

    def _decided(self, decision: StepDecision) -> Iterator[str]:
        yield from _own_faults(decision)
        snapshot = self._snapshot
        if snapshot is None:
            if self._last is not None:
                yield f"step {decision.step} has no snapshot before its decision"
            self._last = decision.step
            return
        if (decision.step, decision.now) != (snapshot.step, snapshot.now):
            yield f"the decision is of step {decision.step}, the snapshot before it of step {snapshot.step}"
        if decision.total_tokens > snapshot.token_budget:
            yield f"{decision.total_tokens} tokens are scheduled, but token_budget is {snapshot.token_budget}"
        ran = set(snapshot.running)
        for name, req_ids in (("running", decision.running), ("preempted", decision.preempted)):
            if unknown := set(req_ids) - ran - set(decision.new) - set(decision.resumed):
                yield f"{name} names {min(unknown)}, which did not run before this step"


def _own_faults(decision: StepDecision) -> Iterator[str]:
    """Yields the faults of a decision that are visible without other records."""
    scheduled = [*decision.new, *decision.resumed, *decision.running]
    if len(set(scheduled)) != len(scheduled):
        yield "new, resumed and running name a request twice"
    if set(scheduled) != decision.tokens.keys():
        yield "tokens does not name the same requests as new, resumed and running do"
    if sum(decision.tokens.values()) != decision.total_tokens:
        yield f"total_tokens is {decision.total_tokens}, but tokens add up to {sum(decision.tokens.values())}"
    if min(decision.tokens.values(), default=1) < 1:
        yield "tokens has a request with less than one"
    for req_id, num_drafts in decision.drafts.items():
        if not 0 < num_drafts < decision.tokens.get(req_id, 0):
            yield f"{num_drafts} tokens of {req_id} are drafts, of {decision.tokens.get(req_id, 0)} scheduled"
    if both := decision.tokens.keys() & set(decision.preempted):
        yield f"{min(both)} is preempted and scheduled at once"


class Blocks:
    """Checks counts: blocks are free, or used by requests and pins; cached blocks may be either."""

    def __init__(self) -> None:
        self._header: TraceHeader | None = None

    def forget(self) -> None:
        pass

    def faults(self, event: TraceEvent) -> Iterator[str]:
        match event:
            case TraceHeader():
                self._header = event
                if untold := not_told(event, "block_size", "num_blocks"):
                    yield untold
            case StepSnapshot():
                yield from self._of_pool(event)
            case StepDecision() if self._header is not None and event.free_blocks > self._header.num_blocks:
                yield f"free_blocks is {event.free_blocks}, but there are {self._header.num_blocks}"
            case PrefixCacheEvent():
                if event.loaded_tokens > event.hit_tokens:
                    yield f"loaded_tokens is {event.loaded_tokens}, but hit_tokens {event.hit_tokens}"
                if event.hit_tokens >= event.num_tokens:
                    yield f"hit_tokens is {event.hit_tokens} of {event.num_tokens}: one is always computed"

    def _of_pool(self, pool: StepSnapshot) -> Iterator[str]:
        num_held = pool.total_blocks - pool.free_blocks
        if self._header is not None and pool.total_blocks != self._header.num_blocks:
            yield f"total_blocks is {pool.total_blocks}, but the header says {self._header.num_blocks}"
        if self._header is not None and pool.host_blocks > self._header.num_host_blocks:
            yield f"host_blocks is {pool.host_blocks}, but there are {self._header.num_host_blocks}"
        if self._header is not None and pool.disk_blocks > self._header.num_disk_blocks:
            yield f"disk_blocks is {pool.disk_blocks}, but there are {self._header.num_disk_blocks}"
        if num_held < 0 or pool.free_blocks < 0:
            yield f"free_blocks is {pool.free_blocks} of {pool.total_blocks}"
        num_pinned = pool.pinned_blocks - (0 if self._header is None else self._header.state_blocks)
        if pool.num_pins == 1 and num_pinned > num_held:  # a state counts as blocks, but uses none
            yield f"pinned_blocks is {num_pinned}, but only {num_held} are not free"
        if not (pool.running or pool.num_loading or pool.num_pins or self._holds_for_the_gone) and num_held:
            yield f"{num_held} blocks are not free, but nothing runs, loads or is pinned"
        if pool.empty_blocks is not None:
            num_free_cached = pool.free_blocks - pool.empty_blocks
            if not 0 <= num_free_cached <= pool.cached_blocks <= num_free_cached + num_held:
                yield (
                    f"of {pool.free_blocks} free blocks {pool.empty_blocks} are empty, which does not fit "
                    f"{pool.cached_blocks} cached ones"
                )

    @property
    def _holds_for_the_gone(self) -> bool:
        """Whether blocks of a request that has ended may stay allocated for a while without a record: for a
        load, or for a step in flight while the next is planned."""
        header = self._header
        return header is None or header.num_host_blocks > 0 or header.async_scheduling


class Pins:
    """Checks that a pin is created once, shrinks, and ends once, and that snapshots agree with the events."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        """Number of blocks by pin id, for pins that have not ended."""
        self._highest_id = 0
        self._knows_all = False

    def forget(self) -> None:
        self._blocks.clear()
        self._highest_id = 0
        self._knows_all = False

    def faults(self, event: TraceEvent) -> Iterator[str]:
        match event:
            case TraceHeader():
                self._knows_all = event.from_start and event.policy in TELL_OF_PINS
            case StepSnapshot() if self._knows_all:
                num_blocks = sum(self._blocks.values())
                if (event.num_pins, event.pinned_blocks) != (len(self._blocks), num_blocks):
                    yield (
                        f"{event.num_pins} pins hold {event.pinned_blocks} blocks, but by their events it is "
                        f"{len(self._blocks)} with {num_blocks}"
                    )
            case PinEvent():
                yield from self._of_pin(event)

    def _of_pin(self, event: PinEvent) -> Iterator[str]:
        if event.kind not in PIN_KINDS:
            yield f"kind is {event.kind!r}"
        if event.kind == "created":
            yield from self._created(event)
        elif event.kind in ("shrunk", "ended"):
            if event.pin_id in self._blocks:
                yield from self._lost(event, event.pin_id)
            elif self._knows_all:
                yield f"pin {event.pin_id} was not created, or has ended before"
            if event.kind == "ended" and event.cause not in PIN_CAUSES:
                yield f"cause is {event.cause!r}"

    def _created(self, event: PinEvent) -> Iterator[str]:
        if event.pin_id is None or event.pin_id <= self._highest_id:
            yield f"pin_id is {event.pin_id}, but {self._highest_id} was given before"
            return
        self._blocks[event.pin_id] = event.num_blocks
        self._highest_id = event.pin_id

    def _lost(self, event: PinEvent, pin_id: int) -> Iterator[str]:
        if event.kind == "shrunk":
            self._blocks[pin_id] -= event.num_blocks
            if self._blocks[pin_id] < 1:
                yield f"pin {pin_id} is shrunk by {event.num_blocks} blocks, and has none left"
        elif (num_blocks := self._blocks.pop(pin_id)) != event.num_blocks:
            yield f"pin {pin_id} ends with {event.num_blocks} blocks, but had {num_blocks}"


class Turns:
    """Checks that a turn arrives, may be admitted, and ends or is aborted; and that pins go to turns."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}
        """Job of each open turn, by its request."""
        self._num_open: dict[str, int] = {}
        """Number of open turns of each job."""
        self._knows_all = False

    def forget(self) -> None:
        self._open.clear()
        self._num_open.clear()
        self._knows_all = False

    def faults(self, event: TraceEvent) -> Iterator[str]:
        match event:
            case TraceHeader():
                self._knows_all = event.from_start
            case JobEvent() if event.req_id is not None:
                yield from self._of_turn(event, event.req_id)
            case PinEvent(kind="ended", cause="handed_over") if self._knows_all:
                if not self._num_open.get(event.job_id):
                    yield f"pin {event.pin_id} is handed over, but no turn of job {event.job_id} is open"

    def _of_turn(self, event: JobEvent, req_id: str) -> Iterator[str]:
        if event.kind == "turn_arrived":
            if req_id in self._open:
                yield f"turn {req_id} arrived before"
                return
            self._open[req_id] = event.job_id
            self._num_open[event.job_id] = self._num_open.get(event.job_id, 0) + 1
        elif event.kind in ("turn_admitted", "turn_ended", "turn_aborted"):
            if req_id not in self._open:
                if self._knows_all:
                    yield f"{event.kind}: turn {req_id} did not arrive, or has ended before"
            elif event.kind != "turn_admitted":
                self._close(self._open.pop(req_id))

    def _close(self, job_id: str) -> None:
        self._num_open[job_id] -= 1
        if not self._num_open[job_id]:
            del self._num_open[job_id]


class Requests:
    """Checks that records name only requests that arrived and have not ended, and that each ends once."""

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._knows_all = False

    def forget(self) -> None:
        self._open.clear()
        self._knows_all = False

    def faults(self, event: TraceEvent) -> Iterator[str]:
        match event:
            case TraceHeader():
                self._knows_all = event.from_start
            case RequestArrived():
                if event.req_id in self._open:
                    yield f"request {event.req_id} came in before"
                self._open.add(event.req_id)
            case RequestsEnded():
                yield from self._ended(event.req_ids)
            case StepOutput():
                yield from self._ended(event.ended)
            case StepDecision():
                yield from self._known([*event.tokens, *event.preempted, *event.loads])
            case GrammarReady():
                yield from self._known([event.req_id])

    def _known(self, req_ids: list[str]) -> Iterator[str]:
        if self._knows_all and (unknown := set(req_ids) - self._open):
            yield f"request {min(unknown)} did not come in, or has ended before"

    def _ended(self, req_ids: list[str] | dict[str, str]) -> Iterator[str]:
        yield from self._known(list(req_ids))
        self._open.difference_update(req_ids)


class Ending:
    """Checks that the last record counts all events before it, and that nothing follows it."""

    def __init__(self) -> None:
        self._num_events = 0
        self._num_gone = 0
        self._has_ended = False

    def forget(self) -> None:
        pass

    def faults(self, event: TraceEvent) -> Iterator[str]:
        if self._has_ended:
            yield "a record follows the end of the trace"
        match event:
            case TraceHeader():
                self._num_events = event.num_events_before - (event.part > 1)  # repeated headers do not count
            case TraceGap():
                self._num_gone += event.dropped
            case TraceEnd():
                self._has_ended = True
                if event.written != self._num_events:
                    yield f"written is {event.written}, but {self._num_events} events came before"
                if event.dropped < self._num_gone:
                    yield f"dropped is {event.dropped}, but gaps add up to {self._num_gone}"
        if not isinstance(event, TraceGap):
            self._num_events += 1


def all_checks() -> list[Check]:
    return [Times(), Words(), Steps(), Blocks(), Pins(), Turns(), Requests(), Ending()]

"""Formats the difference between a recorded event and the same one of a replay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import msgspec
from msgspec import structs

from tracing.events import InputEvent, PinEvent, TraceEvent

MAX_CHARS = 400
"""Most characters of a value that is shown."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TraceEvent).decode


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event that differs from the recorded one."""

    step: int
    """Number of the current or last planned step; -1 before the first."""
    number: int
    """Number of the event in the trace; the header has number 1."""
    cause: InputEvent
    """The input that caused it."""
    recorded: TraceEvent | None
    """Event of the trace; None: the replay has an additional event."""
    now: TraceEvent | None
    """Event of the replay; None: the replay lacks this event."""

    def __str__(self) -> str:
        head = (
            f"step {self.step} is not as it was: event {self.number} of the trace, after {_shown(self.cause)}"
        )
        return "\n".join([head, *(f"  {line}" for line in self._lines())])

    def _lines(self) -> Iterator[str]:
        recorded = self.recorded
        now = self.now
        if recorded is not None and now is not None and type(recorded) is type(now):
            yield _tag(recorded)
            for name in recorded.__struct_fields__:
                before = getattr(recorded, name)
                after = getattr(now, name)
                if before != after:
                    yield f"  {name}: {_parted(before, after)}"
            return
        yield f"recorded: {'nothing' if recorded is None else _shown(recorded)}"
        yield f"now:      {'nothing' if now is None else _shown(now)}"


def first_difference(
    recorded: list[TraceEvent], now: list[TraceEvent]
) -> tuple[int, TraceEvent | None, TraceEvent | None] | None:
    """Returns place and events of the first pair that differs; None if all are equal."""
    if recorded == now:
        return None
    for place, (before, after) in enumerate(zip_longest(recorded, now)):
        if after is not None:
            after = _decode(_encode(after))  # as in a file, where an infinite number is null
        if before != after and before != _told_as(before, after):
            return place, before, after
    return None


def _told_as(before: TraceEvent | None, after: TraceEvent | None) -> TraceEvent | None:
    """Returns the event of a replay, without fields that did not exist when the trace was written."""
    if isinstance(before, PinEvent) and isinstance(after, PinEvent) and before.needed_blocks is None:
        return structs.replace(after, needed_blocks=None)
    return after


def _parted(before: object, after: object) -> str:
    """Describes the difference; of two mappings only the entries that differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        if names:
            before = {name: before[name] for name in names if name in before}
            after = {name: after[name] for name in names if name in after}
    return f"recorded {_cut(_encode(before).decode())}, now {_cut(_encode(after).decode())}"


def _shown(event: TraceEvent) -> str:
    return _cut(_encode(event).decode())


def _tag(event: TraceEvent) -> str:
    return str(event.__struct_config__.tag)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}... ({len(text):,} characters)"

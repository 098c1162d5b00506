"""The names of each prompt's blocks, reconstructed from a trace that names each block once.

Uses 8 bytes per block: a trace of a day has millions. Equal names mean equal tokens from the very start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tracing.events import BLOCK_NAME_BYTES, RequestArrived, StepOutput, TraceEvent


@dataclass(slots=True, eq=False)
class _Segment:
    """The blocks that one request was the first to have, after those of an earlier one."""

    before: _Segment | None
    num_before: int
    """Blocks of the chain that belong to earlier segments."""
    names: bytearray = field(default_factory=bytearray)

    @property
    def num_blocks(self) -> int:
        """Blocks of the chain up to its end."""
        return self.num_before + len(self.names) // BLOCK_NAME_BYTES


class PromptBlocks:
    """Takes the events of a trace in order; returns the blocks of open requests' prompts."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._ends: dict[bytes, _Segment] = {}
        """Segments by the name of a block after which another chain may continue; others are searched for."""
        self._of: dict[str, tuple[_Segment, int]] = {}
        """Chains by request: where each ends, and how many blocks its prompt fills."""

    def take(self, event: TraceEvent) -> None:
        if isinstance(event, RequestArrived):
            self._open(event)
        elif isinstance(event, StepOutput):
            for req_id, names in event.blocks.items():
                if req_id in self._of:
                    self._extend(self._of[req_id][0], names)

    def _open(self, event: RequestArrived) -> None:
        before = None
        if event.prefix_blocks:
            before = self._ends.get(event.prefix_end) or self._search(event.prefix_end, event.prefix_blocks)
        segment = _Segment(before, event.prefix_blocks)
        self._segments.append(segment)
        self._extend(segment, event.blocks)
        self._of[event.req_id] = (segment, segment.num_blocks)

    def _extend(self, segment: _Segment, names: bytes) -> None:
        segment.names += names
        if names:
            self._ends[names[-BLOCK_NAME_BYTES:]] = segment

    def _search(self, name: bytes, num_blocks: int) -> _Segment:
        """Finds the segment of a block within a chain, which is rare, and stores it for the next time."""
        for segment in reversed(self._segments):
            at = (num_blocks - 1 - segment.num_before) * BLOCK_NAME_BYTES
            if at >= 0 and segment.names[at : at + BLOCK_NAME_BYTES] == name:
                self._ends[name] = segment
                return segment
        # Named in a part of the trace that is gone: any made-up chain with this end does as well.
        segment = _Segment(None, 0, bytearray(_made_up(name, num_blocks)))
        self._segments.append(segment)
        self._ends[name] = segment
        return segment

    def of(self, req_id: str) -> bytes | None:
        """Returns the concatenated names of the full blocks of its prompt; None if the trace lacks its
        arrival."""
        found = self._of.get(req_id)
        if found is None:
            return None
        segment, num_blocks = found
        parts: list[bytes] = []
        at: _Segment | None = segment
        end = num_blocks
        while at is not None and end > 0:
            parts.append(bytes(at.names[: (end - at.num_before) * BLOCK_NAME_BYTES]))
            end = min(end, at.num_before)
            at = at.before
        return b"".join(reversed(parts))

    def forget(self, req_id: str) -> None:
        """Forgets an ended request; others may still continue from its blocks."""
        self._of.pop(req_id, None)


def _made_up(end: bytes, num_blocks: int) -> bytes:
    """Makes names that only prompts with this last name have."""
    value = int.from_bytes(end, "big")
    names = [
        ((value ^ (place * 0x9E3779B97F4A7C15)) % 2**64).to_bytes(BLOCK_NAME_BYTES, "big")
        for place in range(num_blocks - 1, 0, -1)
    ]
    return b"".join(names) + end

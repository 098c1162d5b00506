"""The names of each prompt's blocks, put together from a trace that names each block once.

Kept at 8 bytes a block: a trace of a day has millions. Equal names: equal tokens from the very start.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tracing.events import BLOCK_NAME_BYTES, RequestArrived, StepOutput, TraceEvent


@dataclass(slots=True, eq=False)
class _Segment:
    """The blocks that one request was the first to have, behind those of an earlier one."""

    before: _Segment | None
    num_before: int
    """Blocks of the chain that are not its own."""
    names: bytearray = field(default_factory=bytearray)

    @property
    def num_blocks(self) -> int:
        """Of the chain up to its end."""
        return self.num_before + len(self.names) // BLOCK_NAME_BYTES


class PromptBlocks:
    """Takes the events of a trace in order; tells of each request under way which blocks its prompt has."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._ends: dict[bytes, _Segment] = {}
        """Segments by the name of a block where another chain may go on; those that are not here
        are searched for."""
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
        """A chain may also go on from the middle of another: rare, and looked up the next time."""
        for segment in reversed(self._segments):
            at = (num_blocks - 1 - segment.num_before) * BLOCK_NAME_BYTES
            if at >= 0 and segment.names[at : at + BLOCK_NAME_BYTES] == name:
                self._ends[name] = segment
                return segment
        # Named in a part of the trace that is gone: as good as any chain that is shared to there.
        segment = _Segment(None, 0, bytearray(_made_up(name, num_blocks)))
        self._segments.append(segment)
        self._ends[name] = segment
        return segment

    def of(self, req_id: str) -> bytes | None:
        """Names of the full blocks of its prompt, one behind the other; None: its arrival is not in the
        trace."""
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
        """It is over; others may still go on from its blocks."""
        self._of.pop(req_id, None)


def _made_up(end: bytes, num_blocks: int) -> bytes:
    """Names that only prompts with this end have, which is the last of them."""
    value = int.from_bytes(end, "big")
    names = [
        ((value ^ (place * 0x9E3779B97F4A7C15)) % 2**64).to_bytes(BLOCK_NAME_BYTES, "big")
        for place in range(num_blocks - 1, 0, -1)
    ]
    return b"".join(names) + end

"""Reconstructs the hash chains of recorded requests: a trace names each block once."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.kv_cache.block_hash import BlockHash
from eval.trace.replay.errors import NotReplayableError
from tracing.events import BLOCK_NAME_BYTES, RequestArrived


@dataclass(slots=True, eq=False)
class Segment:
    """The blocks that one request was the first to have, after those of an earlier one."""

    before: Segment | None
    num_before: int
    """Blocks of the chain that belong to earlier segments."""
    names: list[BlockHash] = field(default_factory=list)


class BlockNames:
    """All blocks that a trace has named so far."""

    def __init__(self) -> None:
        self._segments: dict[BlockHash, Segment] = {}

    def open(self, arrived: RequestArrived) -> tuple[Segment, list[BlockHash]]:
        """Returns a segment for the names of its output's blocks, and the chain of its prompt.
        NotReplayableError if the prompt continues a block that was not named."""
        before = self._segments.get(arrived.prefix_end) if arrived.prefix_blocks else None
        if arrived.prefix_blocks and before is None:
            raise NotReplayableError(
                f"request {arrived.req_id} begins with a block that was not named before"
            )
        segment = Segment(before, arrived.prefix_blocks)
        self.extend(segment, arrived.blocks)
        return segment, _chain(segment)

    def extend(self, segment: Segment, names: bytes) -> list[BlockHash]:
        """Adds further full blocks of the request; returns them one by one."""
        new = [names[at : at + BLOCK_NAME_BYTES] for at in range(0, len(names), BLOCK_NAME_BYTES)]
        segment.names += new
        self._segments.update(dict.fromkeys(new, segment))
        return new


def _chain(segment: Segment) -> list[BlockHash]:
    parts: list[list[BlockHash]] = []
    at: Segment | None = segment
    end = segment.num_before + len(segment.names)
    while at is not None:
        parts.append(at.names[: end - at.num_before])
        end = at.num_before
        at = at.before
    return [name for part in reversed(parts) for name in part]

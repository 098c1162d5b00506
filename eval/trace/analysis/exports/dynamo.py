"""Rows of NVIDIA Dynamo's request traces (``dynamo.request.trace.v1``), with the fields for its replay.

A ``request_end`` per turn with the hashes of its prompt's blocks, and a ``tool_end`` per call between turns.
"""

from __future__ import annotations

import struct
from hashlib import blake2b

import msgspec

from eval.trace.analysis.exports.turn_rows import TurnRows
from eval.trace.analysis.jobs import GapLife, TurnLife
from tracing.events import BLOCK_NAME_BYTES

SCHEMA = "dynamo.request.trace.v1"


class AgentContext(msgspec.Struct, kw_only=True):
    session_id: str


class Replay(msgspec.Struct, kw_only=True):
    """A prompt, for a replay of it."""

    trace_block_size: int
    input_length: int
    input_sequence_hashes: list[int]
    """One per block, including a partial last one; equal hashes mean equal tokens from the very start."""


class RequestMetrics(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Metrics of one request, in milliseconds."""

    request_id: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    request_received_ms: int
    prefill_wait_time_ms: float | None = None
    prefill_time_ms: float | None = None
    ttft_ms: float | None = None
    total_time_ms: float
    avg_itl_ms: float | None = None
    kv_hit_rate: float | None = None
    queue_depth: int | None = None
    replay: Replay


class ToolMetrics(msgspec.Struct, kw_only=True):
    tool_call_id: str
    tool_class: str
    status: str
    started_at_unix_ms: int
    ended_at_unix_ms: int
    duration_ms: float


class Row(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of the file."""

    schema: str
    event_type: str
    event_time_unix_ms: int
    event_source: str
    agent_context: AgentContext
    request: RequestMetrics | None = None
    tool: ToolMetrics | None = None


class DynamoExport(TurnRows[tuple[TurnLife, bytes]]):
    """Writes the rows in the order in which requests arrived, and calls at their ends."""

    def keep(self, turn: TurnLife, names: bytes) -> tuple[TurnLife, bytes]:
        return turn, names

    def write(self, kept: tuple[TurnLife, bytes]) -> None:
        self._write_row(self._row(*kept))

    def _unix_ms(self, now: float) -> float:
        """Returns a Unix time in ms; for a simulation, the time since it began."""
        return 1000 * (now - self.header.monotonic_s + self.header.wall_time_s)

    def _row(self, turn: TurnLife, names: bytes) -> Row:
        size = self.header.block_size
        hashes = list(struct.unpack(f">{len(names) // BLOCK_NAME_BYTES}Q", names))
        if turn.num_prompt_tokens > len(hashes) * size:
            hashes.append(_unfilled(names[-BLOCK_NAME_BYTES:], turn.req_id))
        replay = Replay(
            trace_block_size=size, input_length=turn.num_prompt_tokens, input_sequence_hashes=hashes
        )
        return Row(
            schema=SCHEMA,
            event_type="request_end",
            event_time_unix_ms=round(self._unix_ms(turn.ended_s)),
            event_source="continuum",
            agent_context=AgentContext(session_id=turn.job_id or turn.req_id),
            request=self._metrics(turn, replay),
        )

    def _metrics(self, turn: TurnLife, replay: Replay) -> RequestMetrics:
        started_s = turn.started_s
        first_s = turn.first_token_s
        ttft_s = turn.ttft_s
        wait_s = started_s - turn.arrived_s if started_s is not None else None
        prefill_s = ttft_s - wait_s if ttft_s is not None and wait_s is not None else None
        decode_s = turn.ended_s - first_s if first_s is not None else None
        num_gaps = turn.num_output_tokens - 1
        return RequestMetrics(
            request_id=turn.req_id,
            input_tokens=turn.num_prompt_tokens,
            output_tokens=turn.num_output_tokens,
            cached_tokens=turn.cached_tokens,
            request_received_ms=round(self._unix_ms(turn.arrived_s)),
            prefill_wait_time_ms=_ms(wait_s),
            prefill_time_ms=_ms(prefill_s),
            ttft_ms=_ms(ttft_s),
            total_time_ms=round(1000 * turn.duration_s, 3),
            avg_itl_ms=_ms(decode_s / num_gaps if decode_s is not None and num_gaps > 0 else None),
            kv_hit_rate=round(turn.cached_tokens / turn.num_prompt_tokens, 6),
            queue_depth=round(turn.mean_waiting) if turn.mean_waiting is not None else None,
            replay=replay,
        )

    def gap(self, gap: GapLife) -> None:
        """Writes one row per call; parallel calls all end when the last of them did."""
        if gap.ended_s is None or gap.duration_s is None:
            return
        for index, key in enumerate(gap.tools or ()):
            tool = ToolMetrics(
                tool_call_id=f"{gap.req_id}/call-{index}",
                tool_class=key,
                status="succeeded",
                started_at_unix_ms=round(self._unix_ms(gap.started_s)),
                ended_at_unix_ms=round(self._unix_ms(gap.ended_s)),
                duration_ms=round(1000 * gap.duration_s, 3),
            )
            self._write_row(
                Row(
                    schema=SCHEMA,
                    event_type="tool_end",
                    event_time_unix_ms=tool.ended_at_unix_ms,
                    event_source="continuum",
                    agent_context=AgentContext(session_id=gap.job_id),
                    tool=tool,
                )
            )

    def notes_of_rows(self) -> list[str]:
        if self.header.wall_time_s:
            return []
        return ["times are milliseconds since the simulation began, not since 1970"]


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(1000 * value_s, 3)


def _unfilled(last: bytes, req_id: str) -> int:
    """Returns a unique hash for a partial block, as its content is unknown."""
    return int.from_bytes(blake2b(last + req_id.encode(), digest_size=8).digest(), "big")

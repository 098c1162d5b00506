"""What a replay leaves behind, turn by turn and job by job. Times are seconds since the replay began.

A file of records is JSON lines, each with its ``kind``: ``run`` first where it is known, then ``turn`` and
``job`` as they ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.messages import TurnReceipt
from eval.errors import UNREADABLE, ResultError


class RunHeader(msgspec.Struct, kw_only=True, tag_field="kind", tag="run"):
    """Which run the records are of."""

    settings: dict[str, str] = {}
    """All that decides what is sent and when, in words; a run can go on only under the same."""


class TurnRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="turn"):
    """One request, answered or failed. Token counts are the server's own (``usage``)."""

    job_id: str
    turn: int
    """1 for the job's first turn."""
    start_s: float
    latency_s: float = 0.0
    ttft_s: float | None = None
    """None if the request failed."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    queued_s: float | None = None
    """From arrival to first scheduling; only a simulation sees it."""
    replica: int = 0
    """Which of several engines served it."""
    finish_reason: str | None = None
    as_recorded: bool = False
    """Whether the answer was the recorded text."""
    tool: str | None = None
    command: str | None = None
    gap_s: float | None = None
    """Waited after this turn; None after the last."""
    receipt: TurnReceipt | None = None
    """The server's word on what it did about the job's KV, if it has one."""
    error: str | None = None


class JobRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="job"):
    """One job from its first request to its last answer."""

    job_id: str
    source: str = ""
    """The workload it came from."""
    start_s: float
    """Arrival: with a bounded concurrency, when it was let in."""
    end_s: float
    num_turns: int
    """Turns that were answered."""
    num_planned_turns: int
    num_recorded_turns: int
    """More than planned if the job was cut."""
    parent_job: str | None = None
    """It was a sub-agent of that job: its time is part of its parent's too."""
    warmup: bool = False
    """Replayed, but not counted."""
    error: str | None = None

    @property
    def completion_s(self) -> float:
        return self.end_s - self.start_s


class EngineCounters(msgspec.Struct, kw_only=True):
    """What only the engine can say about a run; None or empty where it does not."""

    block_size: int | None = None
    """Tokens per KV block."""
    num_blocks: int | None = None
    """Usable blocks in the pool, of all replicas together."""
    num_preemptions: int | None = None
    computed_prefill_tokens: int | None = None
    """Prompt tokens that were really computed, with what was computed twice."""
    pins_ended: dict[str, int] = {}
    """Pins by how they ended: handed_over, expired, broken, released."""
    pin_block_s: dict[str, float] = {}
    """Blocks times seconds that pins held, by how the holding ended; all but handed_over was for nothing."""
    host_tokens_loaded: int | None = None
    """Tokens whose KV came back from host memory, or from the disk behind it."""
    disk_tokens_loaded: int | None = None
    """Of these: read from disk."""
    kv_usage_at_end: float | None = None
    """Share of the KV pool in use when all jobs had ended; anything but 0 is a leak."""


class Occupancy(msgspec.Struct, kw_only=True):
    """The KV pool over time: parallel lists, one entry per sample. Blocks, of all replicas together."""

    time_s: list[float] = []
    running: list[int] = []
    """Held by running requests, or by ones being loaded (also where a pin holds them too)."""
    pinned: list[int] = []
    """Held by pins alone."""
    cached: list[int] = []
    """Free, but still findable."""
    free: list[int] = []
    """Free and empty."""
    num_running: list[int] = []
    """Requests."""
    num_waiting: list[int] = []


Record = RunHeader | TurnRecord | JobRecord


@dataclass(slots=True)
class Recording:
    """What a file of records holds."""

    header: RunHeader | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    jobs: list[JobRecord] = field(default_factory=list)
    was_cut: bool = False
    """The last line was cut off, as when a run is killed; it is not in the lists."""

    def add(self, record: Record) -> None:
        match record:
            case RunHeader():
                self.header = record
            case TurnRecord():
                self.turns.append(record)
            case JobRecord():
                self.jobs.append(record)


def recomputed_tokens(
    previous: TurnRecord | None, prompt_tokens: int, cached_tokens: int, prefix_tokens: int | None = None
) -> int:
    """Prompt tokens that the job's previous turn had computed and that the cache did not give back.

    The previous turn's prompt and output are taken to be shared in full, or up to ``prefix_tokens`` where
    that is known. A cache keeps whole blocks, and the last token of an answer is never computed, so up to one
    block per turn counts whatever the server does.
    """
    if previous is None:
        return 0
    shared = min(previous.prompt_tokens + previous.output_tokens, prompt_tokens)
    if prefix_tokens is not None:
        shared = min(shared, prefix_tokens)
    return max(0, shared - cached_tokens)


def read_records(path: Path) -> Recording:
    """Read a file of records, also one whose run was killed. Raises ResultError naming a line that is bad."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ResultError(f"Cannot read the records {path}: {error.strerror}.") from error
    decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
    found = Recording()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.add(decoder.decode(line))
        except UNREADABLE as error:
            if number == len(lines):  # no newline behind it: it was being written
                found.was_cut = True
                break
            raise ResultError(f"{path}, line {number}: not a record: {error}.") from error
    return found

"""The records of a replay, turn by turn and job by job. Times are seconds since the replay began.

A file of records is JSON lines, each with its ``kind``: ``run`` first where it is known, then ``turn`` and
``job`` in the order in which they ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from engine.records.messages import TurnReceipt
from engine.records.reported_stats import SpecDecodingStats
from eval.errors import UNREADABLE, ResultError


class RunHeader(msgspec.Struct, kw_only=True, tag_field="kind", tag="run"):
    """The run that the records belong to."""

    settings: dict[str, str] = {}
    """Every setting that decides what is sent and when; a run can be resumed only under equal settings."""


class TurnRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="turn"):
    """One completed or failed request. Token counts are the server's own (``usage``)."""

    job_id: str
    turn: int
    """Number of the turn in its job, from 1."""
    start_s: float
    latency_s: float = 0.0
    ttft_s: float | None = None
    """Time to first token; None if the request failed."""
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    """Cached tokens of the prompt; None if the server does not report them."""
    recomputed_tokens: int | None = None
    """Recomputed tokens, from the receipt or else computed from the previous prompt; None if unknown."""
    output_tokens: int = 0
    queued_s: float | None = None
    """Seconds from arrival to first scheduling; known only in a simulation."""
    replica: int = 0
    """Index of the engine that served it."""
    finish_reason: str | None = None
    as_recorded: bool = False
    """Whether the response was the recorded text."""
    tool: str | None = None
    command: str | None = None
    gap_s: float | None = None
    """Seconds waited after this turn; None after the last."""
    receipt: TurnReceipt | None = None
    """The server's receipt of what it did for the job's KV, if it sends one."""
    error: str | None = None


class JobRecord(msgspec.Struct, kw_only=True, tag_field="kind", tag="job"):
    """One job from its first request to its last response."""

    job_id: str
    source: str = ""
    """Name of its workload."""
    start_s: float
    """Time of arrival; with a bounded concurrency, of the start."""
    end_s: float
    num_turns: int
    """Number of completed turns."""
    num_planned_turns: int
    num_recorded_turns: int
    """Number of recorded turns, more than planned if the job was cut."""
    parent_job: str | None = None
    """The job that started this sub-agent; its time includes this job's."""
    warmup: bool = False
    """Whether it ran during the warm-up, which is not counted."""
    error: str | None = None

    @property
    def completion_s(self) -> float:
        return self.end_s - self.start_s


class VerifiedDrafts(msgspec.Struct, kw_only=True):
    """Counters of speculative decoding, over all requests."""

    num_drafts: int
    """Drafts verified: one per request and step that had any."""
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_place: list[int]
    """Accepted tokens by position in the draft."""
    output_tokens: int
    """All tokens generated in the same period."""

    @classmethod
    def of(cls, counts: Iterable[SpecDecodingStats], output_tokens: int) -> VerifiedDrafts:
        """Sums the counts of schedulers."""
        total = SpecDecodingStats()
        for one in counts:
            total.add(one)
        return cls(
            num_drafts=total.num_drafts,
            drafted_tokens=total.num_draft_tokens,
            accepted_tokens=total.num_accepted_tokens,
            accepted_by_place=total.num_accepted_tokens_per_pos,
            output_tokens=output_tokens,
        )

    @property
    def tokens_per_step(self) -> float | None:
        """Returns output tokens per step of a request, with or without drafts; None without output."""
        num_steps = self.output_tokens - self.accepted_tokens
        return self.output_tokens / num_steps if num_steps > 0 else None

    @property
    def tokens_per_draft(self) -> float | None:
        """The mean acceptance length: output tokens of a step with drafts; None if no step had any."""
        return 1 + self.accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None if none were drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    def acceptance_at(self, place: int) -> float | None:
        """Returns the share of drafts whose token at this position, from 0, was accepted."""
        accepted = self.accepted_by_place[place] if place < len(self.accepted_by_place) else 0
        return accepted / self.num_drafts if self.num_drafts else None


class EngineCounters(msgspec.Struct, kw_only=True):
    """Figures that only the engine can report; None or empty if it does not."""

    block_size: float | None = None
    """Tokens per KV block; with several KV cache groups, the tokens whose whole KV takes one block."""
    num_blocks: int | None = None
    """Usable KV blocks, summed over replicas."""
    num_preemptions: int | None = None
    computed_prefill_tokens: int | None = None
    """Prompt tokens that were computed, including recomputed ones."""
    pins_ended: dict[str, int] = {}
    """Number of pins by how they ended, such as handed_over or expired."""
    pin_block_s: dict[str, float] = {}
    """Pinned blocks times seconds, by how the pins ended; only handed_over was useful."""
    host_tokens_loaded: int | None = None
    """Tokens whose KV was loaded back from host memory or disk."""
    disk_tokens_loaded: int | None = None
    """The part of ``host_tokens_loaded`` that was read from disk."""
    kv_usage_at_end: float | None = None
    """Share of the KV pool in use when all jobs had ended; anything but 0 is a leak."""
    drafts: VerifiedDrafts | None = None
    """Counters of drafts; None if the engine does not draft."""


class Occupancy(msgspec.Struct, kw_only=True):
    """The KV pool over time: parallel lists, one entry per sample, in blocks summed over replicas."""

    time_s: list[float] = []
    running: list[int] = []
    """Blocks of running or loading requests, including pinned ones."""
    pinned: list[int] = []
    """Blocks that only pins retain."""
    cached: list[int] = []
    """Free blocks that are still cached."""
    free: list[int] = []
    """Free blocks without cached content."""
    num_running: list[int] = []
    """Running requests."""
    num_waiting: list[int] = []


Record = RunHeader | TurnRecord | JobRecord


@dataclass(slots=True)
class Recording:
    """The content of a file of records."""

    header: RunHeader | None = None
    turns: list[TurnRecord] = field(default_factory=list)
    jobs: list[JobRecord] = field(default_factory=list)
    was_cut: bool = False
    """Whether the last line was cut off, as by a kill; the lists leave it out."""

    def add(self, record: Record) -> None:
        match record:
            case RunHeader():
                self.header = record
            case TurnRecord():
                self.turns.append(record)
            case JobRecord():
                self.jobs.append(record)


def told(count: int | None) -> int:
    """Returns a count that the server always reports, as a simulation does; asserts that it is not None."""
    assert count is not None, "the server does not tell it"
    return count


def recomputed_tokens(
    previous: TurnRecord | None, prompt_tokens: int, cached_tokens: int, prefix_tokens: int | None = None
) -> int:
    """Returns the prompt tokens that the job's previous turn had computed and that were no longer cached.

    Assumes that the previous turn's prompt and output are shared in full, or up to ``prefix_tokens`` if that
    is known. A cache keeps whole blocks, and the last token of an output is never computed, so up to one
    block per turn counts as recomputed whatever the server does.
    """
    if previous is None:
        return 0
    shared = min(previous.prompt_tokens + previous.output_tokens, prompt_tokens)
    if prefix_tokens is not None:
        shared = min(shared, prefix_tokens)
    return max(0, shared - cached_tokens)


def read_records(path: Path) -> Recording:
    """Reads a file of records, even of a killed run. Raises ResultError that names a bad line."""
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
            if number == len(lines):  # no newline after it: it was being written
                found.was_cut = True
                break
            raise ResultError(f"{path}, line {number}: not a record: {error}.") from error
    return found

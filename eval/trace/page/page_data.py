"""The data of a report's page: the interface between the reader of a trace and the scripts that draw it.

Rows are JSON arrays and repeated texts are indices into ``strings``, so that a page stays small. Times are
seconds since the trace began. Knows nothing of HTML.
"""

from __future__ import annotations

import msgspec

Number = float | int | str | bool | None


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure at the head of the page."""

    label: str
    value: str
    unit: str = ""
    note: str = ""
    """Its meaning, in a few words."""


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the trace and its engine."""

    name: str
    policy: str
    program: str
    """Version of the program that wrote it."""
    began: str | None
    """Calendar time, UTC; None for a simulation's clock."""
    duration_s: float
    block_size: int
    num_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """The pool and the queue over time: the mean over each bucket, which begins at ``t``."""

    bucket_s: float
    t: list[float]
    running: list[float]
    """Blocks; likewise the next three."""
    pinned: list[float]
    cached: list[float]
    free: list[float]
    num_running: list[float]
    """Requests; likewise the rest."""
    num_waiting: list[float]
    num_loading: list[float]
    peak_waiting: list[int]
    """The most waiting requests at one step of the bucket."""


class TurnRow(msgspec.Struct, frozen=True, array_like=True):
    """A turn; its spans follow each other from its arrival on."""

    req_id: str
    number: int
    arrived_s: float
    end: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_known_tokens: int
    cached_tokens: int
    loaded_tokens: int
    recomputed_tokens: int
    num_preemptions: int
    spans: list[float]
    """Three numbers per span: index of the phase in ``PageData.phases``, seconds, and how many of these
    seconds it waited for memory."""


class GapRow(msgspec.Struct, frozen=True, array_like=True):
    """The time after a turn, until the turn that continues it."""

    req_id: str
    """Request id of the turn before the gap."""
    started_s: float
    ended_s: float | None
    tools: int | None
    """The calls, as an index into ``strings``; None: not reported."""
    told: list[tuple[float, str, float | None]]
    """The client's signals meanwhile: time, state of its calls, seconds that they will still take."""


class DecisionRow(msgspec.Struct, frozen=True, array_like=True):
    """How long a rule would pin a tip, and why."""

    now_s: float
    ttl_s: float
    rule: int
    reason: int


class PinRow(msgspec.Struct, frozen=True, array_like=True):
    """KV that was pinned after a turn."""

    req_id: str
    began_s: float
    ended_s: float
    outcome: str
    num_blocks: int
    blocks_at_end: int
    deadline_s: float | None
    num_shrinks: int
    revoked_by: str | None
    spared_s: float | None
    decisions: list[DecisionRow]
    input_names: int
    """Index into ``PageData.input_names``."""
    inputs: list[Number]
    """Inputs of the last decision."""


class JobData(msgspec.Struct, frozen=True, kw_only=True):
    """A job's data."""

    job_id: str
    began_s: float
    ended_s: float
    is_open: bool
    num_turns: int
    """Number of all turns; ``turns`` may end earlier."""
    seconds: list[float]
    """Its wall time by kind, in the order of ``PageData.kinds``."""
    turns: list[TurnRow]
    gaps: list[GapRow]
    pins: list[PinRow]
    tiles: list[float] | None = None
    """Phases of a job with concurrent turns: one for each moment, in the form of a turn's spans."""


class ToolData(msgspec.Struct, frozen=True, kw_only=True):
    """The gaps after one kind of call, and what happened to the KV meanwhile."""

    name: str
    num_gaps: int
    gap_p50_s: float | None
    gap_p90_s: float | None
    granted_p50_s: float | None
    outcomes: dict[str, int]
    spared_s: float
    """Seconds of computing that its pins saved, for blocks that would have been evicted."""
    held_block_s: float
    vain_block_s: float
    """Blocks x seconds pinned that no turn took over."""
    points: list[tuple[float, float, str, int]]
    """A sample of the gaps that ended: seconds, seconds granted, outcome of the pin, job in ``strings``."""


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """All data of the page."""

    trace: TraceFacts
    figures: list[Figure]
    warnings: list[str]
    """Faults of the trace."""
    notes: list[str]
    """Notes on what the page leaves out."""
    phases: list[str]
    """Names of phases, by the numbers in spans."""
    kinds: list[str]
    """The kinds of seconds: like phases, but waits are split into place and memory."""
    seconds: list[float]
    """Seconds of all jobs together, in the order of ``kinds``."""
    series: Series
    jobs: list[JobData]
    tools: list[ToolData]
    strings: list[str]
    input_names: list[list[str]]

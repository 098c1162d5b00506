"""What a report's page is given: the contract between the reading of a trace and the scripts that draw it.

Rows are JSON arrays and texts that repeat are numbers in ``strings``, so that a page stays small. Times are
seconds since the trace began. Knows nothing of HTML.
"""

from __future__ import annotations

import msgspec

Number = float | int | str | bool | None


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the head of the page."""

    label: str
    value: str
    unit: str = ""
    note: str = ""
    """What it means, in a few words."""


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace says of itself and its engine."""

    name: str
    policy: str
    program: str
    """Version of what wrote it."""
    began: str | None
    """Calendar time, UTC; None where the clock was a simulation's."""
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
    """Most that waited at one step of the bucket."""


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
    """Three numbers each: the phase's place in ``PageData.phases``, seconds, and of those seconds the ones in
    which it waited for memory."""


class GapRow(msgspec.Struct, frozen=True, array_like=True):
    """The time after a turn, until the one that continues it."""

    req_id: str
    """Request id of the turn that it follows."""
    started_s: float
    ended_s: float | None
    tools: int | None
    """What was called, in ``strings``; None: not reported."""
    told: list[tuple[float, str, float | None]]
    """What the client said meanwhile: when, the state of its calls, seconds that they will still take."""


class DecisionRow(msgspec.Struct, frozen=True, array_like=True):
    """How long a rule would hold a tip, and why."""

    now_s: float
    ttl_s: float
    rule: int
    reason: int


class PinRow(msgspec.Struct, frozen=True, array_like=True):
    """KV that was held after a turn."""

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
    """Which of ``PageData.input_names``."""
    inputs: list[Number]
    """What the last decision was made from."""


class JobData(msgspec.Struct, frozen=True, kw_only=True):
    """A job's life."""

    job_id: str
    began_s: float
    ended_s: float
    is_open: bool
    num_turns: int
    """All of them; ``turns`` may end earlier."""
    seconds: list[float]
    """Where its wall time went, in the order of ``PageData.kinds``."""
    turns: list[TurnRow]
    gaps: list[GapRow]
    pins: list[PinRow]
    tiles: list[float] | None = None
    """Phases of a job whose turns run side by side: one for each moment, as the spans of a turn."""


class ToolData(msgspec.Struct, frozen=True, kw_only=True):
    """The gaps after one kind of call, and what became of the KV meanwhile."""

    name: str
    num_gaps: int
    gap_p50_s: float | None
    gap_p90_s: float | None
    granted_p50_s: float | None
    outcomes: dict[str, int]
    spared_s: float
    """Seconds of computing that its pins spared, of blocks that would have been evicted."""
    held_block_s: float
    vain_block_s: float
    """Blocks x seconds pinned that no turn took over."""
    points: list[tuple[float, float, str, int]]
    """A sample of the gaps that ended: seconds, seconds granted, outcome of the pin, job in ``strings``."""


class PageData(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page shows."""

    trace: TraceFacts
    figures: list[Figure]
    warnings: list[str]
    """What is wrong with the trace."""
    notes: list[str]
    """What is not on the page."""
    phases: list[str]
    """What a span is, by its number."""
    kinds: list[str]
    """What seconds are told apart into: as phases, but a wait is for its place or for memory."""
    seconds: list[float]
    """Seconds of all jobs together, in the order of ``kinds``."""
    series: Series
    jobs: list[JobData]
    tools: list[ToolData]
    strings: list[str]
    input_names: list[list[str]]

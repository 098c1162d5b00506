"""What a viewer receives as JSON: a ``View`` a few times a second. Times are the core's monotonic seconds.

The core writes it and the page reads it; the processes between them pass it on unread.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from engine.records.messages import JobStatus
from tracing.events import JobEvent, PinEvent

SHARED = 1
"""Owner of a block that several jobs hold; 0: no job, 2: the first job."""


class Phase(StrEnum):
    """What a request does or waits for."""

    QUEUE = "queue"
    LOADING = "loading"
    """Its KV is being loaded from the host tier."""
    PREFILL = "prefill"
    DECODE = "decode"
    MEMORY = "memory"
    """It was preempted and waits for blocks."""


class PhaseChange(msgspec.Struct, array_like=True):
    """A request entered a phase or ended."""

    req_id: str
    job_id: str | None
    """Id of the job; None if the policy knows no job of the request."""
    phase: Phase | None
    """The new phase; None: the request ended."""
    at_s: float


class OpenRequest(msgspec.Struct, kw_only=True):
    """A request that waits or runs."""

    req_id: str
    job_id: str | None
    phase: Phase
    arrived_s: float
    started_s: float | None
    """When it was first scheduled."""
    first_token_s: float | None
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int


class HeldPin(msgspec.Struct, kw_only=True):
    """A pin that is alive."""

    pin_id: int
    job_id: str
    req_id: str
    num_blocks: int
    deadline_s: float


class BlockMap(msgspec.Struct, kw_only=True):
    """The usable blocks of the pool in order, ``blocks_per_cell`` per cell; the last cell may have fewer.

    Shares of a cell are in 255ths of its blocks; the rest is free and caches nothing. A block that both a
    request and a pin hold counts as running.
    """

    num_blocks: int
    blocks_per_cell: int
    running: bytes
    pinned: bytes
    cached: bytes
    """Free blocks with a cached prefix."""
    owners: bytes
    """Which job holds blocks of the cell: 0 none, ``SHARED`` several, else its index in ``jobs`` plus 2."""
    num_running: int
    """Exact number of blocks of each kind; each block counts once."""
    num_pinned: int
    """Blocks that only pins retain."""
    num_cached: int
    num_held: int
    """Blocks that pins retain, including those that a request also uses."""
    jobs: list[str]
    """The jobs that fit in one byte; others count as ``SHARED``."""


class Gauges(msgspec.Struct, kw_only=True):
    """The current state of the engine. Blocks held by a request and a pin count as running and pinned."""

    running: int
    waiting: int
    loading: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    """Blocks, free or not, that hold a cached prefix."""
    empty_blocks: int
    """Free blocks without a cached prefix."""
    pinned_blocks: int
    pins: int
    host_blocks: int
    """Slots of the host tier; 0 if there is none."""
    used_host_blocks: int


class Totals(msgspec.Struct, kw_only=True):
    """Counts since the last view."""

    elapsed_s: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    """Prompt tokens that were computed."""
    generated_tokens: int = 0
    output_steps: int = 0
    """For each request, the steps that generated these tokens; fewer if drafts were accepted."""
    prompt_tokens: int = 0
    """Prompt tokens of requests that joined the batch."""
    hit_tokens: int = 0
    """Prompt tokens found in the cache or loaded."""
    preemptions: int = 0


class Scene(msgspec.Struct, kw_only=True):
    """The whole state, for a viewer that begins; long lists are truncated."""

    policy: str
    requests: list[OpenRequest]
    pins: list[HeldPin]
    """Those pins that expire first."""
    jobs: list[JobStatus]
    """The most recently active jobs."""
    blocks: BlockMap


class View(msgspec.Struct, kw_only=True):
    """The state of the engine, and what has happened since the view before."""

    now: float
    gauges: Gauges
    totals: Totals
    phases: list[PhaseChange] = []
    events: list[PinEvent | JobEvent] = []
    """Decisions, oldest first."""
    num_left_out: int = 0
    """Number of events left out because there were too many."""
    scene: Scene | None = None
    """The whole state, sent now and then."""

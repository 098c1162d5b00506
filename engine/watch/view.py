"""What a viewer is told, as JSON: a ``View`` a few times a second. Times are the core's monotonic seconds.

The core writes it and the page reads it; what lies between hands it on unread.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from engine.messages import JobStatus
from tracing.events import JobEvent, PinEvent

SHARED = 1
"""Owner of a block that several jobs hold; 0 is nobody, the first job is 2."""


class Phase(StrEnum):
    """What a request does, or waits for."""

    QUEUE = "queue"
    LOADING = "loading"
    """Its KV is being loaded from the host tier."""
    PREFILL = "prefill"
    DECODE = "decode"
    MEMORY = "memory"
    """It was preempted, and waits for blocks."""


class PhaseChange(msgspec.Struct, array_like=True):
    """A request went over to a phase, or ended."""

    req_id: str
    job_id: str | None
    """Id of the job; None: of no job that the policy knows."""
    phase: Phase | None
    """Phase of the request; None: it ended."""
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
    """The usable blocks of the pool in order, ``blocks_per_cell`` of them a cell: the last may have less.

    The shares of a cell are in 255ths of its blocks; what is left is free and caches nothing. A block that a
    request and a pin hold counts as running.
    """

    num_blocks: int
    blocks_per_cell: int
    running: bytes
    pinned: bytes
    cached: bytes
    """Free blocks with a cached prefix."""
    owners: bytes
    """Who holds blocks of it: 0 no job, ``SHARED``, else one of them by its place in ``jobs`` plus 2."""
    num_running: int
    """Blocks of each kind, exactly; each counts once."""
    num_pinned: int
    """Blocks that pins alone retain."""
    num_cached: int
    num_held: int
    """Blocks that pins retain, also those that a request runs on."""
    jobs: list[str]
    """Those beyond what a byte can number count as ``SHARED``."""


class Gauges(msgspec.Struct, kw_only=True):
    """The engine as it stands. Blocks held by a request and a pin count as running and pinned."""

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
    """Slots of the host tier; 0 without one."""
    used_host_blocks: int


class Totals(msgspec.Struct, kw_only=True):
    """Counted since the last view."""

    elapsed_s: float = 0.0
    steps: int = 0
    prefill_tokens: int = 0
    """Prompt tokens that were computed."""
    generated_tokens: int = 0
    output_steps: int = 0
    """Steps that these came from, of each request; fewer where drafts were accepted."""
    prompt_tokens: int = 0
    """Prompt tokens of requests that joined the batch."""
    hit_tokens: int = 0
    """Prompt tokens found in the cache, or loaded."""
    preemptions: int = 0


class Scene(msgspec.Struct, kw_only=True):
    """All there is to see, for who begins to look; what is many is cut off."""

    policy: str
    requests: list[OpenRequest]
    pins: list[HeldPin]
    """Pins that run out first."""
    jobs: list[JobStatus]
    """Jobs active last."""
    blocks: BlockMap


class View(msgspec.Struct, kw_only=True):
    """One look at the engine, and what has happened since the one before."""

    now: float
    gauges: Gauges
    totals: Totals
    phases: list[PhaseChange] = []
    events: list[PinEvent | JobEvent] = []
    """What was decided, oldest first."""
    num_left_out: int = 0
    """Events that were too many to be told."""
    scene: Scene | None = None
    """Complete state, sent now and then."""

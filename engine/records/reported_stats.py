"""What the core reports of itself with each step's outputs: gauges, and counts since the last report."""

from __future__ import annotations

from typing import Literal

import msgspec


class JobEnd(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A job without further turns."""

    outcome: str
    """Either ``finished`` or ``forgotten``."""
    duration_s: float
    """Time from its first turn's arrival to the end of its last."""
    queued_s: float
    """The total queue time of its turns, which is part of the duration."""
    num_turns: int


class JobStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Jobs that ended since the last report."""

    num_jobs: int = 0
    """Number of known jobs."""
    ended: list[JobEnd] = []
    gap_errors_s: list[float] = []
    """The absolute error of the predicted median for each turn that returned."""
    num_that_fit: int | None = None
    """How many more jobs like the recent ones may begin now; None before any began."""


class SpecDecodingStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Counts of draft tokens since the last report."""

    num_drafts: int = 0
    """Number of times that a request's drafts were verified in a step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Tokens that these steps gained beyond one for each request."""
    num_accepted_tokens_per_pos: list[int] = []
    """Accepted tokens by their place in the draft."""

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Count the result of one request's drafts in one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        by_place = self.num_accepted_tokens_per_pos
        by_place += [0] * (num_accepted - len(by_place))
        for place in range(num_accepted):
            by_place[place] += 1

    def add(self, other: SpecDecodingStats) -> None:
        """Add the counts of another."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        by_place = self.num_accepted_tokens_per_pos
        by_place += [0] * (len(other.num_accepted_tokens_per_pos) - len(by_place))
        for place, count in enumerate(other.num_accepted_tokens_per_pos):
            by_place[place] += count


class BlockLives(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Sampled KV blocks that were evicted since the last report."""

    lifetimes_s: list[float] = []
    """Times from allocation to eviction."""
    idle_s: list[float] = []
    """Times from the last use to eviction."""
    reuse_gaps_s: list[float] = []
    """Times between two uses."""


class LoRAStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Adapters of requests, by their keys."""

    max_loras: int
    """Most adapters of running requests."""
    running: list[str] = []
    waiting: list[str] = []


class ContinuedStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Requests since the last report that came without the tokens of the turn that they continue."""

    num_known: int = 0
    num_forgotten: int = 0
    """Requests whose turn the core did not have, so that it requested all of their tokens."""


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Gauges after a step, and counters since the last report."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_total_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    """Blocks, free or not, that are in the prefix cache."""
    num_pinned_blocks: int = 0
    num_pins: int = 0
    step_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    pins_ended: dict[str, int] = {}
    """Number of pins that ended, by cause."""
    pin_block_s: dict[str, float] = {}
    """Block-seconds of pins that ended, by cause."""
    pin_held_s: dict[str, list[float]] = {}
    """Lifetimes of pins that ended, by cause."""
    jobs: JobStats | None = None
    """Statistics of jobs; None if the policy tracks no jobs."""
    num_host_blocks: int = 0
    """Slots of the host tier; 0 without one."""
    num_used_host_blocks: int = 0
    loaded_tokens: int = 0
    """Tokens whose KV was loaded: from the host tier, disk, another server or the shared folder."""
    failed_loads: int = 0
    remote_loaded_tokens: int = 0
    """Loaded tokens that came from another server or the shared folder."""
    remote_failed_loads: int = 0
    """Failed loads from another server or the shared folder."""
    num_disk_blocks: int = 0
    """Slots of the disk tier; 0 without one."""
    num_used_disk_blocks: int = 0
    disk_loaded_tokens: int = 0
    """Loaded tokens that were read from disk."""
    disk_failed_loads: int = 0
    """Failed loads that read from disk."""
    disk_written_blocks: int = 0
    disk_failed_writes: int = 0
    """Blocks that could not be written to disk."""
    disk_dropped_writes: int = 0
    """Blocks that were not written to disk since too many writes were in flight."""
    trace_dropped: int = 0
    """Trace events that were lost."""
    telemetry_dropped: int = 0
    """Spans that did not reach the collector."""
    superseded_blocks: int = 0
    """Device blocks released to be evicted first, since their jobs continued without them."""
    num_states: int = 0
    """State slots; 0 for a model whose layers have none."""
    num_free_states: int = 0
    tokens_without_state: int = 0
    """Tokens recomputed although their KV was cached: there was no state after them."""
    spec_decoding: SpecDecodingStats | None = None
    """Counts of draft tokens; None if there were none."""
    block_lives: BlockLives | None = None
    """None if no block is sampled, or none was evicted."""
    continued: ContinuedStats | None = None
    """Counts of continued requests; None if there were none."""
    lora: LoRAStats | None = None
    """None if there are no adapters."""
    kv_events_dropped: int = 0
    """Batches of KV events or pin events that were lost, as they came faster than they could be sent."""
    num_pinned_alone_blocks: int = 0
    """Blocks that only pins hold; they can be taken, so they are not in use."""

    @property
    def kv_usage(self) -> float:
        """The share of the KV blocks that running work holds, for a pool that has some. Blocks that only pins
        hold do not count: an idle server uses none."""
        in_use = self.num_total_blocks - self.num_free_blocks - self.num_pinned_alone_blocks
        return in_use / self.num_total_blocks

    @property
    def host_loaded_tokens(self) -> int:
        """Loaded tokens that came from host memory."""
        return self.loaded_tokens - self.disk_loaded_tokens - self.remote_loaded_tokens

    @property
    def host_failed_loads(self) -> int:
        """Failed loads from host memory."""
        return self.failed_loads - self.disk_failed_loads - self.remote_failed_loads


class TraceState(msgspec.Struct, kw_only=True):
    """Whether the scheduler's trace is being written. If not, other fields describe the last one."""

    object: Literal["trace"] = "trace"
    state: Literal["off", "opening", "on", "closing"]
    """``closing``: remaining events are being written; ``off``: they are, or there never was a
    trace."""
    name: str | None
    """The name of its (first) file."""
    part: int
    """The number of the file that is being written."""
    from_start: bool
    """Whether it began with the engine, and so can be replayed."""
    written: int
    """Number of events in the file."""
    dropped: int
    """Number of events lost since they came faster than they could be written."""
    error: str | None
    """Why it could not be started, or ended early."""

"""All that crosses a process boundary, as msgspec structs (positional, defaults omitted).

Front end to core: EngineCoreRequest, AbortRequest, Signal, UtilityRequest, ClientNotice.
Core to front end: EngineCoreOutputs. Times are monotonic seconds.
"""

from __future__ import annotations

from enum import Enum, IntEnum, StrEnum
from typing import Any, Literal

import msgspec

from engine.sampling_params import SamplingParams
from tracing.events import BaseReceipt


class EngineCoreRequestType(Enum):
    """First frame of a message to the core; one byte. The values are V1's where V1 has the type."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"
    SIGNAL = b"\x06"
    JOIN = b"\x07"
    LEAVE = b"\x08"


class FinishReason(IntEnum):
    """Why a request ended; every request ends with exactly one."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class MediaSpan(msgspec.Struct, array_like=True, frozen=True):
    """A picture or sound in the prompt: its content hash makes the blocks it covers its own."""

    content_hash: str
    offset: int
    length: int


class JobRef(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """Which job a turn belongs to, as the client said."""

    job_id: str | None = None
    """None: nobody said; the policy infers it from what the prompt continues."""
    is_last_step: bool = False
    tenant: str | None = None
    num_replies: int | None = None
    """The model's replies in the prompt; None: not counted, as in a plain text."""
    num_results: int | None = None
    """Results of tools in the prompt."""
    traceparent: str | None = None
    """The client's own span, of which the turn is a part, in W3C's form."""
    owner: str | None = None
    """Whose API key it was, by its name: nobody else may come upon the job. None: a key without a name, or
    none at all. Who shares with whom is said by ``tenant``."""


class RequestContext(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, kw_only=True):
    """What goes with a request: made where its body is read, and carried to the core without being changed.

    A field that is added here reaches the core: only who reads it from the body and who acts on it change.
    """

    job: JobRef | None = None
    """The job that the request is a turn of; None: it is no turn of a job."""
    priority: int = 0
    """A request of a lower one goes first, where the policy looks at it."""
    cache_salt: str | None = None
    """Requests of different salts find no prefix of each other."""
    adapter: str | None = None

    @property
    def owner(self) -> str | None:
        """The name of the API key that the request came with."""
        return None if self.job is None else self.job.owner


NO_CONTEXT = RequestContext()
"""The context of a request of which nothing was said."""


class EngineCoreRequest(RequestContext, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """One request as the core sees it: tokens, never text; and its context."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    media: list[MediaSpan] = []
    external_req_id: str | None = None
    client_index: int = 0
    """The front end that is sent the outputs."""


class AbortRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """End requests early. ``stopped`` tells a stop string (a turn that ended) from a client that left."""

    request_ids: list[str]
    stopped: bool = False


class ToolCall(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """A tool call as the model wrote it. ``arguments`` is its JSON text."""

    name: str
    arguments: str = ""


class ToolGapStarted(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """A turn of a job ended and these tool calls run now (none: it ended with an answer).

    ``request_id`` names the turn: whose job it was may have been inferred.
    """

    request_id: str
    calls: list[ToolCall] = []


class JobFinished(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """The client says that no turn of this job will come any more."""

    job_id: str


class ToolState(StrEnum):
    """What a client says of a tool call that it runs."""

    STARTED = "started"
    PROGRESS = "progress"
    FINISHED = "finished"
    """Its result will be in the next turn, which is about to come."""
    CANCELLED = "cancelled"
    """It will give no result."""


class ToolSignal(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """The client's own word about a tool call that runs since a turn of this job ended. Seconds from now."""

    job_id: str
    state: ToolState
    request_id: str | None = None
    """The turn that called it, by the id its client knows; None: the job's latest."""
    call_id: str | None = None
    """Of parallel calls, which; None: all of them."""
    tool: str | None = None
    expected_s: float | None = None
    """How long it will take from now on, as told when it starts."""
    remaining_s: float | None = None
    """How long it will still take."""
    fraction: float | None = None
    """How much of it is done, in [0, 1]."""


Signal = ToolGapStarted | JobFinished | ToolSignal


class SignalRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A signal to the core; the receipt (or None) comes back as UtilityOutput of the same call."""

    call_id: int | None
    """None: no answer is wanted."""
    signal: Signal
    client_index: int = 0


class UtilityRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A method of the core to call by name; the answer comes back as UtilityOutput."""

    call_id: int
    method: str
    args: list[Any] = []
    client_index: int = 0


class ClientNotice(msgspec.Struct, array_like=True):
    """JOIN: a front end listens for outputs from now on. LEAVE: it has gone, its requests are to be ended."""

    client_index: int


class UtilityOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """The answer to a UtilityRequest; ``failure`` holds the error's text if it failed."""

    call_id: int
    result: Any = None
    failure: str | None = None


class TokenLogprobs(msgspec.Struct, array_like=True):
    """One position: the chosen token first, then the alternatives, most probable first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the chosen token among all, 1 = most probable."""


class TurnReceipt(BaseReceipt, omit_defaults=True, frozen=True):
    """What the engine did about a job's KV in this turn, for the client. Token counts are of the prompt."""

    request_id: str
    prompt_tokens: int = 0
    diverged_at_token: int | None = None
    """Where the prompt parts from what the job had computed, the start of the first block that differs; None:
    nowhere."""
    diverged_tokens: int = 0
    """Tokens of the job beyond that, of no use any more."""
    superseded_tokens: int = 0
    """Tokens of the job that were let go when this turn came, as it shows that the job goes on without them:
    their memory is reused first."""


class FrontierStatus(msgspec.Struct, kw_only=True):
    """Where a turn of a job ended that no other turn has continued yet. Seconds are from now."""

    request_id: str
    turn: int
    num_tokens: int
    """In full blocks."""
    elapsed_s: float
    """Since the turn ended."""
    tools: list[str] | None
    """Kinds of calls that run; empty: it called none; None: not known yet."""
    pinned_blocks: int
    ttl_s: float | None
    """How long they are still held; None: not held."""
    reason: str
    """Why so long."""
    expected_return_s: float | None
    """Median time until the next turn; None: not known, or beyond all that was ever seen."""
    earliest_return_s: float | None
    """One in ten is back before that."""
    latest_return_s: float | None
    """Nine in ten are."""
    num_observations: float
    """How many calls that rests on, old and borrowed ones in part."""
    told: str | None
    """What the client said last of its calls: a ToolState."""


class PastTurn(msgspec.Struct, kw_only=True):
    """A turn of a job that has ended, and what its client was told of it: its receipt as it stood last."""

    request_id: str
    turn: int
    elapsed_s: float
    """Since it ended."""
    queue_s: float
    """From its arrival until it was scheduled."""
    prefill_s: float
    """From then to its first token."""
    decode_s: float
    gap_s: float | None
    """Between the job's previous turn and this one."""
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    output_tokens: int
    previous_pin: str | None
    """How the pin it came back to had ended."""
    tools: list[str] | None
    """Kinds of calls that ran after it; None: not known."""
    pinned_tokens: int
    ttl_s: float
    reason: str


class JobStatus(msgspec.Struct, kw_only=True):
    """What is known of one job."""

    id: str
    object: Literal["job"] = "job"
    tenant: str | None
    inferred: bool
    """Nobody named it: its turns were recognised by their prompts."""
    kind: str | None
    """The same for jobs whose prompts begin alike; None of a short prompt."""
    turns: int
    open_turns: list[str]
    """Requests that wait or run."""
    age_s: float
    idle_s: float
    """Since its last turn came or ended."""
    pinned_blocks: int
    ttl_s: float | None
    """How long anything of it is still held; None: nothing is."""
    expected_return_s: float | None
    """Until the turn that is expected first; None: not known."""
    frontiers: list[FrontierStatus]


class TraceState(msgspec.Struct, kw_only=True):
    """Whether the scheduler's trace is being written; what is told of its file is of the last one if not."""

    object: Literal["trace"] = "trace"
    state: Literal["off", "opening", "on", "closing"]
    """``closing``: all that happened is being written down; ``off``: it is, or there never was a trace."""
    name: str | None
    """Of its (first) file."""
    part: int
    """Which of its files is being written."""
    from_start: bool
    """Whether it began with the engine, and so can be replayed."""
    written: int
    """Events that are in the file."""
    dropped: int
    """Events that are not, since they came faster than they could be written."""
    error: str | None
    """Why it could not begin, or ended early."""


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0
    """Time from arrival to first scheduling; set on the first output."""
    receipt: TurnReceipt | None = None
    """With the last output of a job's turn."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class JobEnd(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A job of which no more turns are expected."""

    outcome: str
    """finished | forgotten"""
    duration_s: float
    """From its first turn's arrival to the end of its last."""
    queued_s: float
    """Of that, its turns together waited so long to be admitted."""
    num_turns: int


class JobStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What became of jobs since the last report."""

    num_jobs: int = 0
    """That are known now."""
    ended: list[JobEnd] = []
    gap_errors_s: list[float] = []
    """Of turns that came back: how far the median that was expected was from what it took."""


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Gauges after a step, and counts since the last report."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_total_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    """Blocks, free or not, that hold a findable prefix."""
    num_pinned_blocks: int = 0
    num_pins: int = 0
    step_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    pins_ended: dict[str, int] = {}
    """Cause to count."""
    pin_block_s: dict[str, float] = {}
    """Cause to blocks times seconds held."""
    pin_held_s: dict[str, list[float]] = {}
    """Cause to how long each of these pins had been held."""
    jobs: JobStats | None = None
    """None: the policy knows no jobs."""
    num_host_blocks: int = 0
    """Slots of the host tier; 0 without one."""
    num_used_host_blocks: int = 0
    loaded_tokens: int = 0
    """Tokens whose KV came back from the host tier or from disk."""
    failed_loads: int = 0
    num_disk_blocks: int = 0
    """Slots of the disk behind the host tier; 0 without one."""
    num_used_disk_blocks: int = 0
    disk_loaded_tokens: int = 0
    """Of those loaded: read from disk."""
    disk_failed_loads: int = 0
    """Of those that failed: loads that read from disk."""
    disk_written_blocks: int = 0
    disk_failed_writes: int = 0
    """Blocks that could not be written."""
    disk_dropped_writes: int = 0
    """Blocks that were not written because too many were on their way already."""
    trace_dropped: int = 0
    """Events of the trace that were lost."""
    telemetry_dropped: int = 0
    """Spans that the collector did not get."""
    superseded_blocks: int = 0
    """Of the device: let go to be reused first, since their jobs went on without them."""


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message per step to the front end."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None


class EngineReady(msgspec.Struct, omit_defaults=True):
    """READY of the start-up handshake: what the front end has to know of the core."""

    num_gpu_blocks: int
    max_model_len: int
    block_size: int
    vocab_size: int
    dtype: str
    wants_signals: bool = False
    """Whether the policy makes use of signals; if not, none are sent."""


class EngineStartFailed(msgspec.Struct, tag=True):
    """The core could not start: one sentence for the user and the error's class name."""

    error: str
    message: str


ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""Sent instead of EngineCoreOutputs when the core's loop died of an error."""

"""Messages between processes, as msgspec structs (positional, defaults omitted). The core receives
EngineCoreRequest, AbortRequest, Signal, UtilityRequest and ClientNotice, and sends EngineCoreOutputs. Times
are monotonic seconds.
"""

from __future__ import annotations

from enum import Enum, IntEnum, StrEnum
from typing import Any, Literal

import msgspec

from engine.records.adapters import Adapter
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from engine.records.kv_transfer import KVLeased, KVTransfer
from engine.records.lessons import ModelLearned
from engine.records.media import MediaModels, MediaSize
from engine.records.pooling import Pooled, PoolingModel, PoolingParams
from engine.records.reported_stats import SchedulerStats
from engine.records.routed_experts import RoutedExperts
from engine.records.sampling_params import SamplingParams
from tracing.events import BaseReceipt, MovedTurn


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
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class MediaSpan(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """A picture or an audio clip in the prompt; its content hash is part of those of the blocks it covers."""

    content_hash: str
    offset: int
    """Place of its first token."""
    length: int
    """Number of its tokens, and of the embeddings that the model's encoder makes of it."""
    size: MediaSize | None = None
    """The size in which the model reads it; None in a trace."""
    path: str = ""
    """The file of its pixels or samples, which exists until the request ends; empty in a trace."""

    @property
    def end(self) -> int:
        """Place after its last token."""
        return self.offset + self.length


class JobRef(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """The job of a turn, as the client identified it."""

    job_id: str | None = None
    """The job's id; None if the client named none: the policy infers it from the prompt's prefix."""
    is_last_step: bool = False
    tenant: str | None = None
    num_replies: int | None = None
    """Number of the model's replies in the prompt; None if not counted, as in plain text."""
    num_results: int | None = None
    """Number of tool results in the prompt."""
    traceparent: str | None = None
    """The client's own span, of which the turn is a part, in W3C's format."""
    owner: str | None = None
    """The name of the API key, which alone may see the job; None for none. Sharing is by ``tenant``."""
    asked_ttl_s: float | None = None
    """How long the client wants the turn's KV kept: a minimum for its pin, where that is worth it."""
    is_silent: bool = False
    """Whether the client gets nothing before the whole answer: then it disconnects sooner."""
    deadline_s: float | None = None
    """Seconds from the turn's arrival after which its answer is of no use."""
    moved: MovedTurn | None = None
    """The turn that it continues, if another core ran that; its core finds this out, no client."""
    parent_id: str | None = None
    """The job that waits for this one, as the client named it."""
    prewarms: bool = False
    """Whether the request only computes KV that a later turn will use; its output is not sent."""


class RequestContext(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True, kw_only=True):
    """Data that accompanies a request unchanged, from its body to the core.

    A new field here reaches the core: only its reader and its user change.
    """

    job: JobRef | None = None
    """The job that the request is a turn of; None if it belongs to no job."""
    priority: int = 0
    """Requests with a lower priority value go first, if the policy uses it."""
    cache_salt: str | None = None
    """Requests with different salts share no cached prefix."""
    adapter: Adapter | None = None
    kv_transfer: KVTransfer | None = None
    pooling: PoolingParams | None = None
    """Parameters of a request to a pooling model, which has no other requests."""
    media: tuple[MediaSpan, ...] = ()
    """The prompt's pictures and clips, in its order; no two overlap."""
    keeps_tokens: bool = False
    """Whether the core keeps the turn's tokens, so that a later request may continue them."""

    @property
    def owner(self) -> str | None:
        """The name of the API key that the request came with."""
        return None if self.job is None else self.job.owner


NO_CONTEXT = RequestContext()
"""The context of a request without any."""


class TurnPrefix(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """The first tokens of a turn that ended, its prompt and its output, by the core's id of it."""

    request_id: str
    num_tokens: int
    tail: list[int] = []
    """The last of them, by which the core verifies that it has the right turn."""


class EngineCoreRequest(RequestContext, array_like=True, omit_defaults=True, frozen=True, gc=False):
    """A request as the core sees it: tokens instead of text, and the context."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    external_req_id: str | None = None
    client_index: int = 0
    """The API server process that receives the outputs."""
    continues: TurnPrefix | None = None
    """The tokens before ``prompt_token_ids``; the core knows them, or requests the whole request."""


class AbortRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """Ends requests early. ``stopped`` distinguishes a stop string (a turn that ended) from a
    client that left."""

    request_ids: list[str]
    stopped: bool = False


class ToolCall(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """A tool call as the model wrote it. ``arguments`` is its JSON text."""

    name: str
    arguments: str = ""


class ToolGapStarted(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """A turn of a job ended and these tool calls run now; none if it ended with an answer.

    ``request_id`` names the turn, since its job may have been inferred.
    """

    request_id: str
    calls: list[ToolCall] = []


class JobFinished(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """The client reports that the job has no more turns."""

    job_id: str


class ToolState(StrEnum):
    """The state of a tool call, as reported by the client that runs it."""

    STARTED = "started"
    PROGRESS = "progress"
    FINISHED = "finished"
    """The call has finished; its result comes with the next turn."""
    CANCELLED = "cancelled"
    """The call was cancelled and has no result."""


class ToolSignal(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """A client's report on a tool call that runs since a turn of this job ended. Seconds from now."""

    job_id: str
    state: ToolState
    request_id: str | None = None
    """The turn that made the call, by the client's request id; None is the job's latest."""
    call_id: str | None = None
    """One of several parallel calls; None: all of them."""
    tool: str | None = None
    expected_s: float | None = None
    """How long the call will take from its start."""
    remaining_s: float | None = None
    """How long the call will still take."""
    fraction: float | None = None
    """The fraction of the call that is done, in [0, 1]."""


Signal = ToolGapStarted | JobFinished | ToolSignal | ModelLearned


class SignalRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A signal to the core; its receipt (or None) is returned as UtilityOutput with the same call
    id."""

    call_id: int | None
    """The id of the call; None if no response is wanted."""
    signal: Signal
    client_index: int = 0


class UtilityRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """Calls a method of the core by name; the result is returned as UtilityOutput."""

    call_id: int
    method: str
    args: list[Any] = []
    client_index: int = 0


class ClientNotice(msgspec.Struct, array_like=True):
    """JOIN: an API server process receives outputs from now on. LEAVE: it ended; abort its requests."""

    client_index: int


class UtilityOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """The response to a UtilityRequest; ``failure`` holds the error message if it failed."""

    call_id: int
    result: Any = None
    failure: str | None = None


class TokenLogprobs(msgspec.Struct, array_like=True):
    """One position: the chosen token first, then the alternatives, the most probable first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """The rank of the chosen token; 1 is the most probable."""


class TurnReceipt(BaseReceipt, omit_defaults=True, frozen=True):
    """What the engine did with a job's KV in this turn, for the client, and in how many steps it answered.
    Token counts are of the prompt, except for the last ones."""

    request_id: str
    prompt_tokens: int = 0
    diverged_at_token: int | None = None
    """Where the prompt diverges from what the job had computed: the start of the first block that
    differs. None if it does not."""
    diverged_tokens: int = 0
    """Tokens of the job after that point, which are of no further use."""
    superseded_tokens: int = 0
    """Tokens of the job released when this turn came, as it shows that the job continues without
    them: their blocks are evicted first."""
    prewarmed_tokens: int = 0
    """Cached tokens that no earlier turn had computed, but a request that prewarmed this turn."""
    output_steps: int = 0
    """Steps that the answer's tokens came from; as many as tokens if nothing was drafted."""
    drafted_tokens: int = 0
    """Draft tokens that were verified."""
    accepted_tokens: int = 0
    """Tokens of the answer that drafts spared a step: its tokens less ``output_steps``."""


class JobUsage(msgspec.Struct, kw_only=True):
    """What those turns of a job have used that this core has run to their end, or until they were cut off."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed."""
    output_tokens: int = 0
    queued_s: float = 0.0
    """Time until they were admitted."""


class BranchStatus(msgspec.Struct, kw_only=True):
    """A branch tip: the end of a turn that no other turn has continued yet. Seconds are from now."""

    request_id: str
    turn: int
    num_tokens: int
    """Number of tokens in full blocks."""
    elapsed_s: float
    """Time since the turn ended."""
    tools: list[str] | None
    """Kinds of the calls that run; empty if there are none, None if not known yet."""
    pinned_blocks: int
    ttl_s: float | None
    """How long the blocks are still retained; None if they are not."""
    reason: str
    """Why they are retained that long."""
    expected_return_s: float | None
    """The median time until the next turn; None if unknown, or beyond all observations."""
    earliest_return_s: float | None
    """The 10th percentile of that time."""
    latest_return_s: float | None
    """The 90th percentile of that time."""
    num_observations: float
    """Number of calls that the prediction rests on; old and borrowed ones count in part."""
    told: str | None
    """The client's last report on its calls: a ToolState."""


class PastTurn(msgspec.Struct, kw_only=True):
    """A finished turn of a job, and its receipt in the latest state."""

    request_id: str
    turn: int
    elapsed_s: float
    """Time since the turn ended."""
    queue_s: float
    """Time from arrival to first scheduling."""
    prefill_s: float
    """Time from first scheduling to the first token."""
    decode_s: float
    gap_s: float | None
    """Time between the job's previous turn and this one."""
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    output_tokens: int
    output_steps: int
    """Steps that these came from."""
    drafted_tokens: int
    accepted_tokens: int
    """Output tokens that drafts spared a step."""
    previous_pin: str | None
    """How the pin of the turn that it continued ended."""
    tools: list[str] | None
    """Kinds of the calls that ran after the turn; None if unknown."""
    pinned_tokens: int
    ttl_s: float
    reason: str


class JobStatus(msgspec.Struct, kw_only=True):
    """The state of one job."""

    id: str
    object: Literal["job"] = "job"
    tenant: str | None
    parent: str | None
    """The job that waits for this one, as its client named it."""
    children: list[str]
    """The remembered jobs that named this one their parent, the newest last; at most 64."""
    inferred: bool
    """Whether the job was inferred from its prompts, since no client named it."""
    kind: str | None
    """The group of jobs whose prompts begin alike; None for a short prompt."""
    turns: int
    open_turns: list[str]
    """Ids of the job's requests that wait or run."""
    usage: JobUsage
    age_s: float
    idle_s: float
    """Time since its last turn arrived or ended."""
    pinned_blocks: int
    ttl_s: float | None
    """How long any of its KV is still retained; None if none is."""
    expected_return_s: float | None
    """Predicted time until its next turn; None if unknown."""
    branches: list[BranchStatus]


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The output of one step for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0
    """The time from arrival to first scheduling; set on the first output."""
    receipt: TurnReceipt | None = None
    """The receipt, with the last output of a job's turn."""
    routed_experts: RoutedExperts | None = None
    kv_leased: KVLeased | None = None
    pooled: Pooled | None = None
    late_by_s: float | None = None
    """The request was refused: it is expected to start this many seconds too late."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message per step to an API server process."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    engine_index: int = 0
    """Number of the core; set by the client of a group, never sent."""
    wanted_whole: list[str] = []
    """Requests that continue a turn unknown to the core: the client must send them as a whole."""


class EngineReady(msgspec.Struct, omit_defaults=True):
    """READY of the start-up handshake: what an API server process needs to know of the core."""

    num_gpu_blocks: int
    max_model_len: int
    block_size: int
    vocab_size: int
    dtype: str
    wants_signals: bool = False
    """Whether the policy uses signals; if not, none are sent."""
    orders_by_priority: bool = False
    """Whether the policy serves requests of a lower ``priority`` first."""
    prompt_logprobs: bool = True
    kv_cache_groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP
    """Layers that share a block table; a block of the pool is of one group."""
    pooling: PoolingModel | None = None
    """Properties of a pooling model; None: the model generates."""
    media: MediaModels | None = None
    """How the model reads pictures and audio; None: it reads text only."""
    most_draft_bytes: int = 0
    hands_over: bool = False
    """Whether what pins hold is saved when the core is drained or stops."""
    start_phases: tuple[tuple[str, float], ...] = ()
    """What was loaded, and the seconds that it took."""


class EngineStartFailed(msgspec.Struct, tag=True):
    """The core could not start: an error message for the user and the error's class name."""

    error: str
    message: str


ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
"""Message sent instead of EngineCoreOutputs when the core's loop died of an error."""

"""The records of a scheduler trace: one tagged union, JSON lines, a schema version in the first line.

``StepSnapshot`` (before) and ``StepDecision`` (after) of one ``schedule()`` carry the same ``step``. Times
are monotonic seconds; ``TraceHeader.wall_time_s`` ties them to the calendar.

The trace holds every input of the scheduler and its policy, in the order in which they took effect: requests,
their ends from outside, signals, results of steps, and each moment at which it was asked. The record of an
input stands *behind* the events that it caused, and ends their group (``InputEvent``): the same code,
given the inputs in this order, makes the same events.
"""

from __future__ import annotations

import msgspec

SCHEMA_VERSION = 3
BLOCK_NAME_BYTES = 8
"""How many bytes of a block's hash a trace has: enough to distinguish blocks."""


class TraceHeader(msgspec.Struct, tag_field="type", tag="header", kw_only=True):
    """First line of every file of a trace: what the scheduler and its policy were made from."""

    schema_version: int = SCHEMA_VERSION
    """Version of these records. Version 2 is read, too (``tracing/versions.py``); others are refused."""
    wall_time_s: float
    """Unix time, in seconds, when the trace was opened."""
    monotonic_s: float
    """The engine's clock at the same moment."""
    from_start: bool = False
    """Whether the trace began with the engine, before its first request: only then can it be replayed."""
    program: str = ""
    """Version of the program that wrote it."""
    machine: dict[str, str] = {}
    """What it was written with: versions of ``python``, ``numpy``, ``blas`` and ``libc``, model of ``cpu``.
    No decision depends on them."""
    policy: str = ""
    """Name of the policy, as ``--scheduling-policy`` and ``continuum simulate`` take it."""
    policy_options: dict[str, float | int | str | bool | None] = {}
    """All options of the policy by name, defaults included; an infinite number is the text ``inf``."""
    estimator_state: str | None = None
    """What the policy's estimator had learned when it started, as in its state file (JSON); None: it began
    with nothing."""
    block_size: int = 0
    """Tokens per KV block."""
    num_blocks: int = 0
    """Usable blocks of the pool."""
    kv_group_windows: list[int] = []
    """Tokens of the sliding window of each KV cache group of the model, 0 for full attention; a
    block of the pool is of one group. Empty: there is one group, of full attention."""
    kv_group_chunks: list[int] = []
    """Tokens of the chunks to which attention of each group is local, 0 for none. Empty: none has any."""
    num_states: int = 0
    """Usable state slots of a model that has layers with states; 0: it has none."""
    state_blocks: int = 0
    """Blocks that a state counts as, by its bytes; 0 without states."""
    num_host_blocks: int = 0
    """Blocks that fit on the host tier; 0: there is none."""
    min_load_tokens: int = 0
    """Fewer tokens are recomputed rather than loaded from the host tier; 0 without one."""
    num_disk_blocks: int = 0
    """Blocks that fit on disk, which takes what the host tier evicts; 0: there is none."""
    max_disk_writes: int = 0
    """Most blocks that may be in flight to disk; one more is not written."""
    disk_fixed_tokens: float = 0.0
    """Fixed cost of a read from disk, as the number of tokens computed in the same time."""
    disk_read_share: float = 0.0
    """Time to read a token's KV from disk, as a share of the time to compute it."""
    enable_prefix_caching: bool = True
    """Whether the KV of equal prefixes is reused."""
    max_model_len: int = 0
    """Most tokens of a request, prompt and output."""
    max_num_seqs: int = 0
    """Most requests running at once."""
    max_loras: int = 0
    """Most adapters of running requests; 0: there are none."""
    encoder_cache_size: int = 0
    """Embeddings of pictures that are kept; 0: the model reads no pictures."""
    max_encoder_input_tokens: int = 0
    """Most embeddings of pictures that a step computes."""
    disable_chunked_mm_input: bool = False
    """Whether a step is cut before a picture that does not fit whole."""
    max_num_batched_tokens: int = 0
    """Token budget of a step."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may take several steps."""
    long_prefill_token_threshold: int = 0
    """Most prefill tokens of one request per step; 0: no limit."""
    scheduler_reserve_full_isl: bool = True
    """Whether a request is admitted only if its whole sequence fits in the free blocks."""
    async_scheduling: bool = False
    """Whether a step is decided while the previous one runs."""
    num_stages: int = 1
    """Stages of the pipeline: so many steps run at once, and no request in two that need each other's
    tokens."""
    num_lookahead_tokens: int = 0
    """Places behind a request's tokens for the KV of a drafter with weights; 0: there is none."""
    loads_remote: bool = False
    """Whether requests may have a prefix that another server has computed."""
    part: int = 1
    """Number of this file. Later files repeat the header but for this field, the next and ``from_start``."""
    num_events_before: int = 0
    """Events in the parts before this one; repeated headers are not counted."""


class BaseReceipt(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What was reported to the client of a turn about its job's KV, except for the turn's id."""

    job_id: str
    turn: int
    """1 for the job's first turn."""
    cached_tokens: int = 0
    """Tokens of the prompt that were cached when it was first admitted."""
    recomputed_tokens: int = 0
    """Tokens that were recomputed although an earlier turn of the job had their KV."""
    pinned_tokens: int = 0
    """Tokens whose KV is pinned for the next turn."""
    ttl_s: float = 0.0
    """How long they are pinned, from the end of the turn."""
    reason: str = ""
    """Why they are pinned for that long, or not at all."""
    expected_tool_s: float | None = None
    """Predicted median duration of the calls, from the end of the turn."""
    asked_ttl_s: float | None = None
    """How long its client asked to keep its KV."""
    previous_pin: str | None = None
    """How the pin it came back to had ended: handed_over | expired | revoked | released | superseded."""
    gap_s: float | None = None
    """Time since the job's previous turn ended."""


class Receipt(BaseReceipt, omit_defaults=True, frozen=True):
    """What was reported to the client of a turn about its job's KV; a part of other records."""

    req_id: str


class ReportedToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool call as the model wrote it; a part of ``SignalEvent``."""

    name: str
    """Name of the tool."""
    arguments: str = ""
    """Arguments as JSON text."""


class RequestArrived(
    msgspec.Struct, tag_field="type", tag="request_arrived", kw_only=True, omit_defaults=True
):
    """Input: the scheduler received a request. Of its tokens only those that the policy may read are kept.

    The names of its prompt's full blocks are, in this order: the first ``prefix_blocks`` of an earlier
    request in this file (those up to the block named ``prefix_end``), then ``blocks``. Equal names mean
    equal tokens from the start of the prompt.
    """

    now: float
    req_id: str
    external_id: str | None = None
    """Id by which its client knows it; None: the same one."""
    arrival_s: float
    """When the API server accepted it, on the same clock."""
    num_prompt_tokens: int
    """Length of its prompt."""
    max_tokens: int
    """Most tokens of output."""
    priority: int = 0
    """Smaller goes first, under policies that use priorities."""
    in_job: bool = False
    """Whether it may be a turn of a job; if so without ``job_id``, its job is inferred."""
    job_id: str | None = None
    """Id of the job, as its client sent it."""
    is_last_step: bool = False
    """Whether its client declared it the job's last turn."""
    tenant: str | None = None
    """Name under which it gets its share of pins, batch slots and the queue."""
    owner: str | None = None
    """Name of the API key it came with."""
    adapter: str | None = None
    """Name and digest of its adapter."""
    media: list[tuple[str, int, int]] = []
    """Pictures of its prompt: the name of its content, its first token and its number of tokens."""
    num_replies: int | None = None
    """Number of the model's messages in the prompt; None: not counted."""
    num_results: int | None = None
    """Number of tool results in the prompt; None: not counted."""
    asked_ttl_s: float | None = None
    """How long its client asks to keep its KV."""
    is_silent: bool = False
    """Whether its client hears nothing before the whole answer is there."""
    awaits_grammar: bool = False
    """Whether it joins the queue only with the ``GrammarReady`` of its id."""
    prefix_blocks: int = 0
    """Number of an earlier request's blocks that its prompt begins with."""
    prefix_end: bytes = b""
    """Name of the last of them; empty if there are none."""
    blocks: bytes = b""
    """Names of the prompt's other full blocks, ``BLOCK_NAME_BYTES`` each."""
    remote_tokens: int = 0
    """First tokens of the prompt that another server has computed."""
    must_load: bool = False
    """Whether it ends with an error if these cannot be fetched."""
    lease_s: float = 0.0
    """For how long its KV is leased out to another server when it ends; 0: it is not."""
    tokens: list[tuple[int, list[int]]] = []
    """Runs of the prompt's tokens: the place of the first, counted from 0, and their ids."""


class GrammarReady(msgspec.Struct, tag_field="type", tag="grammar_ready", kw_only=True):
    """Input: the grammar that a request awaited is compiled, and it may run."""

    now: float
    req_id: str


class RequestsEnded(msgspec.Struct, tag_field="type", tag="requests_ended", kw_only=True, omit_defaults=True):
    """Input: requests were ended from outside the scheduler, in this order."""

    now: float
    req_ids: list[str]
    """Ids of these requests."""
    how: str
    """One of: stopped (the API server found a stop string: the turn ended as by itself) |
    aborted | error."""
    receipts: list[Receipt] = []
    """Receipts of the turns that ended this way, in their order."""


class SignalEvent(msgspec.Struct, tag_field="type", tag="signal", kw_only=True, omit_defaults=True):
    """Input: a report about a tool call or a job, which is answered with a receipt."""

    now: float
    kind: str
    """One of: tool_gap_started (the API server has read the turn's calls) | tool_signal (its
    client reports a call) | job_finished | model_learned (of jobs or of calls)."""
    req_id: str | None = None
    """Id of the turn; in a ``tool_signal`` the client's id."""
    job_id: str | None = None
    """Id of the job, where the signal names it."""
    calls: list[ReportedToolCall] = []
    """Calls of a ``tool_gap_started``; empty: the turn ended with an answer."""
    state: str | None = None
    """State in a ``tool_signal``: started | progress | finished | cancelled."""
    call_id: str | None = None
    """Which of the parallel calls; None: all of them."""
    tool: str | None = None
    """Name of the tool that is called."""
    expected_s: float | None = None
    """How long the call will take, as reported when it starts."""
    remaining_s: float | None = None
    """How long the call will still take, as reported."""
    fraction: float | None = None
    """How much of the call is done, in [0, 1]."""
    model: str | None = None
    """The model of a ``model_learned``, as the trainer wrote it."""
    receipt: Receipt | None = None
    """The policy's new decision about the turn; None: it knows no such turn."""


class PauseEvent(msgspec.Struct, tag_field="type", tag="pause", kw_only=True):
    """Input: the scheduler was paused or resumed."""

    now: float
    state: str
    """One of: unpaused | paused_new (nothing is admitted) | paused_all (nothing is scheduled)."""


class PrefixCacheReset(msgspec.Struct, tag_field="type", tag="prefix_cache_reset", kw_only=True):
    """Input: all pins were ended and all cached blocks evicted, on every tier."""

    now: float
    done: bool
    """False: nothing was evicted, as requests had blocks."""


class EncoderCacheReset(msgspec.Struct, tag_field="type", tag="encoder_cache_reset", kw_only=True):
    """Input: the operator cleared what is kept of pictures that no request needs."""

    now: float


class IdleEvent(msgspec.Struct, tag_field="type", tag="idle", kw_only=True):
    """Input: the scheduler was asked, between steps, to end the pins that are due."""

    now: float


class StepOutput(msgspec.Struct, tag_field="type", tag="step_output", kw_only=True, omit_defaults=True):
    """Input: a step's result came back. Requests that ended meanwhile may be among those it names."""

    step: int
    """Step that this is the result of: the last one decided, or with ``async_scheduling`` the one before it,
    in a pipeline one of the last ``num_stages``.
    Transfers may be reported in between."""
    now: float
    sampled: list[str] | None = None
    """Requests that got tokens, in the worker's order; None: all that the step scheduled, in its order."""
    num_tokens: dict[str, int] = {}
    """Number of tokens of those that did not get exactly one."""
    ended: dict[str, str] = {}
    """Requests that ended by these tokens: stop (by one, their grammar or a repetition) | length | error (no
    token could follow)."""
    forgotten: list[str] = []
    """Those of them whose logits were not finite: their blocks are evicted from the prefix cache."""
    blocks: dict[str, bytes] = {}
    """Names of the blocks that these tokens filled, ``BLOCK_NAME_BYTES`` each, by request."""
    finished_loads: list[int] = []
    """Loads from the host tier and from disk that are done, numbered from 1 in the order of their start."""
    failed_loads: list[int] = []
    """Loads that failed: their tokens are recomputed."""
    finished_disk_writes: list[int] = []
    """Disk slots that have been written."""
    failed_disk_writes: list[int] = []
    """Disk slots that could not be written, and are not used again."""
    released_leases: list[str] = []
    """Requests whose leased KV has been read, or is not wanted."""
    renewed_leases: list[str] = []
    """Requests whose leased KV is still to be read: it is held for as long again."""
    receipts: list[Receipt] = []
    """Receipts of the turns that ended, in their order."""


class DraftsProposed(msgspec.Struct, tag_field="type", tag="drafts", kw_only=True):
    """Input: draft tokens for the next step to verify, before what does not fit is cut off."""

    now: float
    num_tokens: dict[str, int]
    """Number of drafts by request."""


class EngineClosed(msgspec.Struct, tag_field="type", tag="closed", kw_only=True):
    """Input: the engine stops, and all pins end."""

    now: float


class StepSnapshot(msgspec.Struct, tag_field="type", tag="step_snapshot", kw_only=True):
    """The state a step starts from, before it decides anything."""

    step: int
    now: float
    running: list[str]
    """Running requests, in the scheduler's order."""
    num_waiting: int
    """Requests in the queue, without those that load or await a grammar."""
    waiting_head: list[str]
    """The first few waiting requests, in order (all would be linear in the queue)."""
    free_blocks: int
    """Blocks used by no request and no pin, including cached ones."""
    empty_blocks: int | None = None
    """Free blocks that cache nothing."""
    cached_blocks: int
    """Cached blocks, free or not."""
    pinned_blocks: int
    """Pinned blocks; one in two pins is counted twice."""
    num_pins: int
    """Number of pins."""
    total_blocks: int
    """Usable blocks of the pool."""
    token_budget: int
    """Most tokens that this step may schedule; 0 while all is paused."""
    free_states: int = 0
    """State slots used by no request and no pin, including cached ones; 0 without states."""
    num_loading: int = 0
    """Requests that have their blocks and wait for a load to end, or for the next step after it."""
    host_blocks: int = 0
    """Blocks on the host tier."""
    disk_blocks: int = 0
    """Blocks on disk; one may be on the host tier, too."""


class StepDecision(msgspec.Struct, tag_field="type", tag="step_decision", kw_only=True):
    """What the step with the same number decided."""

    step: int
    now: float
    new: list[str]
    """Requests admitted for the first time."""
    resumed: list[str]
    """Requests admitted again after a preemption."""
    running: list[str]
    """Requests that were in the batch and are scheduled."""
    preempted: list[str]
    """Requests that lost their blocks and wait again."""
    tokens: dict[str, int]
    """Scheduled tokens by request id."""
    total_tokens: int
    """Sum of ``tokens``."""
    free_blocks: int
    """Free blocks after the step was planned."""
    loads: dict[str, int] = {}
    """Blocks whose load from the host tier, from disk or from another server starts, by request id."""
    disk_loads: dict[str, int] = {}
    """How many of these are read from disk, by request id; requests without any are left out."""
    stored_blocks: int = 0
    """Blocks that this step offloads to the host tier."""
    written_blocks: int = 0
    """Blocks evicted from the host tier whose write to disk starts."""
    drafts: dict[str, int] = {}
    """How many of ``tokens`` are drafts, by request id: behind at least one token that is known."""
    remote_loads: dict[str, int] = {}
    """How many blocks of ``loads`` come from another server, by request id; others are left out."""
    leased_blocks: int = 0
    """Blocks that are leased out to other servers from this step on."""
    ended_leases: int = 0
    """Leases that have ended since the step before."""


class PrefixCacheEvent(msgspec.Struct, tag_field="type", tag="prefix_cache_event", kw_only=True):
    """A request joined the batch: how much of its prefix was cached."""

    step: int
    now: float
    req_id: str
    job_id: str | None
    hit_tokens: int
    """Tokens found in the pool or loaded to it."""
    num_prompt_tokens: int
    """Length of its prompt."""
    num_tokens: int
    """Length of the prompt plus any output so far (a resumed request has some)."""
    resumed: bool
    """Whether it ran before and was preempted."""
    loaded_tokens: int = 0
    """How many of the hit tokens were loaded from the host tier or from disk."""
    disk_tokens: int = 0
    """How many of the loaded tokens were read from disk."""
    without_state_tokens: int = 0
    """Tokens behind the hit whose KV was cached, too, but without a state of the layers that keep one."""


class PinEvent(msgspec.Struct, tag_field="type", tag="pin_event", kw_only=True, omit_defaults=True):
    """A decision about a pin with all its inputs, or how the pin ended."""

    now: float
    kind: str
    """One of: created | decided | refused | shrunk | ended."""
    pin_id: int | None = None
    """Id of the pin; None where nothing is pinned."""
    job_id: str
    req_id: str
    num_blocks: int
    """Blocks of the pin (for ``shrunk``: the blocks it lost)."""
    deadline_s: float | None = None
    """For ``created`` and ``ended``: when it was to expire, on the clock of ``now``."""
    ttl_s: float | None = None
    """For ``decided``: how long to pin, from the end of the turn."""
    rule: str | None = None
    """For ``decided``: the policy's rule."""
    reason: str | None = None
    """Why, in a few words."""
    inputs: dict[str, float | int | str | bool | None] = {}
    """Inputs of the rule; the same inputs give the same decision."""
    cause: str | None = None
    """For ``ended``: handed_over | expired | revoked | released | superseded (the job went on without it).
    For ``shrunk``: superseded, or None where it was revoked."""
    held_s: float | None = None
    """For ``ended``: how long it was pinned, from the end of the turn."""
    needed_blocks: int | None = None
    """For ``ended``: how many of its blocks would have been evicted without it, least recently used first;
    None where that is not told."""
    by: str | None = None
    """Request for which it was revoked or shrunk, or which superseded it. None: another pin, by a limit."""


class JobEvent(msgspec.Struct, tag_field="type", tag="job_event", kw_only=True, omit_defaults=True):
    """A job's life: a turn arrived, started to run, ended; a tool gap opened or closed."""

    now: float
    kind: str
    """One of: turn_arrived | turn_parked (its job may not start yet) | turn_admitted |
    turn_ended | turn_aborted | tools_started | finished | forgotten (nothing more is known of
    the job); or what a client reports of its calls: reported_started | reported_progress |
    reported_finished | reported_cancelled."""
    job_id: str
    req_id: str | None = None
    turn: int = 0
    """Number of the turn in its job, from 1; for ``finished``: how many there were."""
    continues: str | None = None
    """For ``turn_arrived``: the request of the turn that it continues."""
    repeats: str | None = None
    """For ``turn_arrived``: an earlier request of the same turn, which its client aborted."""
    waits_since_s: float | None = None
    """For ``turn_arrived``: since when that request had waited, if it still did; this one keeps its place."""
    earlier_id: str | None = None
    """For ``turn_arrived``: the job's id in all records before this turn, in which its client named it."""
    num_prompt_tokens: int = 0
    """Length of the turn's prompt."""
    num_output_tokens: int = 0
    """Output tokens so far; all of them when the turn has ended."""
    num_known_tokens: int = 0
    """Prompt tokens, in full blocks, that the turn it continues had computed already."""
    cached_tokens: int = 0
    """Prompt tokens that were cached when it was first admitted."""
    recomputed_tokens: int = 0
    """Prompt tokens recomputed although an earlier turn of the job had their KV."""
    tools: list[str] = []
    """Tool keys as the estimator sees them."""
    gap_s: float | None = None
    """For ``turn_arrived``: time since the end of the turn that it continues."""
    diverged_at_token: int | None = None
    """Where the prompt diverges from what the job had computed, in full blocks."""
    diverged_tokens: int = 0
    """Tokens of the job beyond that point, whose KV is of no more use."""
    supersedes: str | None = None
    """For a turn that goes on without the end of an earlier one: the request of that earlier turn."""
    superseded_tokens: int = 0
    """Tokens of that turn whose blocks are evicted first from now on, unless they are in use."""
    predicted_excess_s: float | None = None
    """For ``turn_arrived``: seconds of service beyond a usual job's, by a learned model that is believed."""
    reported_remaining_s: float | None = None
    """Seconds that the calls will still take, as the client reported."""
    needed_blocks: int = 0
    """For ``turn_parked``: blocks that the jobs already started are predicted to need."""
    allowed_blocks: int = 0
    """For ``turn_parked``: the most blocks that they and this job may need."""


class TraceGap(msgspec.Struct, tag_field="type", tag="gap", kw_only=True):
    """Stands for events that were dropped: what follows cannot be replayed."""

    dropped: int
    """Number of dropped events."""


class TraceEnd(msgspec.Struct, tag_field="type", tag="end", kw_only=True):
    """Last line of a trace that was closed in order: a trace without it was cut off."""

    written: int
    """Events before this one, in all parts; repeated headers are not counted."""
    dropped: int
    """Events that were emitted and are not in the trace."""


InputEvent = (
    RequestArrived
    | GrammarReady
    | RequestsEnded
    | SignalEvent
    | PauseEvent
    | PrefixCacheReset
    | EncoderCacheReset
    | IdleEvent
    | DraftsProposed
    | StepDecision
    | StepOutput
    | EngineClosed
)
"""Each ends the group of events that one call of the scheduler caused; a ``StepDecision`` ends that of the
call that planned a step at ``now``."""

TraceEvent = (
    TraceHeader | StepSnapshot | PrefixCacheEvent | PinEvent | JobEvent | InputEvent | TraceGap | TraceEnd
)

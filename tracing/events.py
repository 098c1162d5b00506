"""The records of a scheduler trace: one tagged union, JSON lines, a schema version in the first line.

``StepSnapshot`` (before) and ``StepDecision`` (after) of one ``schedule()`` carry the same ``step``. Times
are monotonic seconds; ``TraceHeader.wall_time_s`` maps them to the calendar.

The trace holds every input of the scheduler and its policy, in the order in which they took effect: requests,
their ends from outside, signals, results of steps, and the time of each call. The record of an input follows
the events that it caused, and ends their group (``InputEvent``): the same code, given the inputs in this
order, makes the same events.
"""

from __future__ import annotations

import msgspec

SCHEMA_VERSION = 3
BLOCK_NAME_BYTES = 8
"""Number of bytes of a block's hash in a trace: enough to distinguish blocks."""


class TraceHeader(msgspec.Struct, tag_field="type", tag="header", kw_only=True):
    """First line of every file of a trace: the configuration of the scheduler and its policy."""

    schema_version: int = SCHEMA_VERSION
    """Version of these records. Version 2 can be read, too (``tracing/versions.py``); others are refused."""
    wall_time_s: float
    """Unix time, in seconds, when the trace was opened."""
    monotonic_s: float
    """The engine's clock at the same moment."""
    from_start: bool = False
    """Whether the trace began with the engine, before its first request: only then can it be replayed."""
    program: str = ""
    """Version of the program that wrote it."""
    machine: dict[str, str] = {}
    """Software and machine: versions of ``python``, ``numpy``, ``blas`` and ``libc``, model of ``cpu``. No
    decision depends on them."""
    policy: str = ""
    """Name of the policy, as ``--scheduling-policy`` and ``continuum simulate`` take it."""
    policy_options: dict[str, float | int | str | bool | None] = {}
    """All options of the policy by name, defaults included; an infinite number is the text ``inf``."""
    estimator_state: str | None = None
    """What the policy's estimator had learned when it started, as in its state file (JSON); None: nothing."""
    block_size: int = 0
    """Tokens per KV block."""
    num_blocks: int = 0
    """Usable blocks of the pool."""
    kv_group_windows: list[int] = []
    """Tokens of the sliding window of each KV cache group of the model, 0 for full attention; a block of the
    pool belongs to one group. Empty: there is one group, of full attention."""
    kv_group_chunks: list[int] = []
    """Tokens of the chunks to which attention of each group is local, 0 for none. Empty: none has any."""
    num_states: int = 0
    """Usable state slots of a model with layers that keep states; 0: it has none."""
    state_blocks: int = 0
    """Number of blocks that a state counts as, by its bytes; 0 without states."""
    num_host_blocks: int = 0
    """Blocks that fit on the host tier; 0: there is none."""
    min_load_tokens: int = 0
    """A load of fewer tokens from the host tier is recomputed instead; 0 without one."""
    num_disk_blocks: int = 0
    """Blocks that fit on disk, which stores what the host tier evicts; 0: there is none."""
    max_disk_writes: int = 0
    """Maximum number of blocks in flight to disk; further ones are not written."""
    disk_fixed_tokens: float = 0.0
    """Fixed cost of a read from disk, as the number of tokens computed in the same time."""
    disk_read_share: float = 0.0
    """Time to read a token's KV from disk, as a share of the time to compute it."""
    enable_prefix_caching: bool = True
    """Whether the KV of equal prefixes is reused."""
    max_model_len: int = 0
    """Maximum number of tokens of a request, prompt and output."""
    max_num_seqs: int = 0
    """Maximum number of requests running at once."""
    max_loras: int = 0
    """Maximum number of adapters of running requests; 0: there are none."""
    encoder_cache_size: int = 0
    """Number of embeddings of pictures and clips that are cached; 0: the model reads text only."""
    max_encoder_input_tokens: int = 0
    """Maximum number of embeddings of pictures and clips that a step computes."""
    disable_chunked_mm_input: bool = False
    """Whether a step ends before a picture or clip that does not fit as a whole."""
    max_num_batched_tokens: int = 0
    """Token budget of a step."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may take several steps."""
    long_prefill_token_threshold: int = 0
    """Maximum number of prefill tokens of one request per step; 0: no limit."""
    scheduler_reserve_full_isl: bool = True
    """Whether a request is admitted only if its whole sequence fits in the free blocks."""
    async_scheduling: bool = False
    """Whether a step is decided while the previous one runs."""
    num_stages: int = 1
    """Stages of the pipeline: this many steps run at once, and no request is in two that need each other's
    tokens."""
    num_lookahead_tokens: int = 0
    """Slots after a request's tokens for the KV of a drafter with weights; 0: there is none."""
    loads_remote: bool = False
    """Whether requests may have a prefix that another server has computed."""
    part: int = 1
    """Number of this file. Later files repeat the header except this field, the next and ``from_start``."""
    num_events_before: int = 0
    """Events in the parts before this one; repeated headers are not counted."""


class BaseReceipt(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What was reported to the client of a turn about its job's KV, except for the turn's id."""

    job_id: str
    turn: int
    """1 for the job's first turn."""
    cached_tokens: int = 0
    """Tokens of the prompt that were cached, or loaded, when it was first admitted."""
    recomputed_tokens: int = 0
    """Tokens that were recomputed although an earlier turn of the job had their KV."""
    pinned_tokens: int = 0
    """Tokens whose KV is pinned for the next turn."""
    ttl_s: float = 0.0
    """Seconds for which they are pinned, from the end of the turn."""
    reason: str = ""
    """Why they are pinned for that time, or not at all."""
    expected_tool_s: float | None = None
    """Predicted median duration of the calls, from the end of the turn."""
    asked_ttl_s: float | None = None
    """Seconds for which its client requested to keep its KV."""
    previous_pin: str | None = None
    """How the pin of the previous turn ended: handed_over | expired | revoked | released | superseded."""
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


class MovedTurn(msgspec.Struct, omit_defaults=True, frozen=True, kw_only=True):
    """The end of a turn that another core ran, and its job, as the core that gets the next turn finds it.
    Times are seconds before that turn's arrival."""

    job_id: str
    request_id: str
    """Id of the turn's request."""
    turn: int
    """Number of the turn in its job."""
    num_turns: int
    """Number of turns that the job had begun."""
    num_prompt_tokens: int
    """Length of the turn's prompt."""
    elapsed_s: float
    """Time since the turn ended."""
    age_s: float
    """Time since the job's first turn arrived."""
    num_blocks: int
    """Number of the turn's full blocks that the next prompt begins with, too: as told at least, as found
    exactly."""
    more_blocks: bytes = b""
    """Beginnings of the hashes of its other full blocks."""
    queued_s: float = 0.0
    """Total time that the job's turns waited for admission."""
    is_inferred: bool = False
    """Whether its client sent no job id."""
    external_id: str = ""
    """Id by which the client knows the request."""
    tools: list[str] | None = None
    """Kinds of the calls that run; None: the reply was not parsed yet."""
    prompt_tail: list[int] = []
    """Last tokens of its prompt, beyond the blocks that the next prompt must share."""
    num_replies: int | None = None
    """Number of the model's messages in its prompt; None: not counted."""
    num_results: int | None = None
    """Number of tool results in its prompt; None: not counted."""
    num_output_tokens: int = 0
    """Number of tokens of its answer."""
    num_task_tokens: int = 0
    """Length of the prompt of the conversation's first turn."""


class RequestArrived(
    msgspec.Struct, tag_field="type", tag="request_arrived", kw_only=True, omit_defaults=True
):
    """Input: the scheduler received a request. Of its tokens only those that the policy may read are
    recorded.

    The names of its prompt's full blocks are, in this order: the first ``prefix_blocks`` of an earlier
    request in this file (those up to the block named ``prefix_end``), then ``blocks``. Equal names mean equal
    tokens from the start of the prompt.
    """

    now: float
    req_id: str
    external_id: str | None = None
    """Id by which the client knows it; None: the same id."""
    arrival_s: float
    """When the API server accepted it, on the same clock."""
    num_prompt_tokens: int
    """Length of its prompt."""
    max_tokens: int
    """Maximum number of output tokens."""
    priority: int = 0
    """Smaller goes first, under policies that use priorities."""
    in_job: bool = False
    """Whether it may be a turn of a job; if so, and without ``job_id``, its job is inferred."""
    job_id: str | None = None
    """Id of the job, as its client sent it."""
    parent_id: str | None = None
    """Id of the job that waits for it, as its client sent it."""
    is_last_step: bool = False
    """Whether its client declared it the job's last turn."""
    tenant: str | None = None
    """Name under which it gets its share of pins, batch slots and the queue."""
    owner: str | None = None
    """Name of the API key that it was sent with."""
    adapter: str | None = None
    """Name and digest of its adapter."""
    media: list[tuple[str, int, int]] = []
    """Pictures and clips of its prompt: the name of its content, its first token and its number of tokens."""
    num_replies: int | None = None
    """Number of the model's messages in the prompt; None: not counted."""
    num_results: int | None = None
    """Number of tool results in the prompt; None: not counted."""
    asked_ttl_s: float | None = None
    """Seconds for which its client requests to keep its KV."""
    is_silent: bool = False
    """Whether its client receives nothing before the whole answer."""
    deadline_s: float | None = None
    """Seconds from its arrival after which its answer is of no use, as its client said."""
    prewarms: bool = False
    """Whether it only computes KV that a later turn will use."""
    awaits_grammar: bool = False
    """Whether it joins the queue only after the ``GrammarReady`` of its id."""
    prefix_blocks: int = 0
    """Number of blocks of an earlier request that its prompt begins with."""
    prefix_end: bytes = b""
    """Name of the last of them; empty if there are none."""
    blocks: bytes = b""
    """Names of the prompt's other full blocks, ``BLOCK_NAME_BYTES`` each."""
    remote_tokens: int = 0
    """Number of tokens at the start of the prompt that another server has computed."""
    must_load: bool = False
    """Whether it ends with an error if these cannot be fetched."""
    lease_s: float = 0.0
    """Seconds for which its KV is leased to another server when it ends; 0: it is not."""
    moved: MovedTurn | None = None
    """The turn that it continues, if another core ran that; None: this core did, or it continues none."""
    tokens: list[tuple[int, list[int]]] = []
    """Runs of the prompt's tokens: the position of the first, counted from 0, and their ids."""


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
    """One of: stopped (the API server found a stop string: the turn ended normally) | aborted | error."""
    receipts: list[Receipt] = []
    """Receipts of the turns that ended this way, in their order."""


class SignalEvent(msgspec.Struct, tag_field="type", tag="signal", kw_only=True, omit_defaults=True):
    """Input: a report about a tool call or a job, which the policy answers with a receipt."""

    now: float
    kind: str
    """One of: tool_gap_started (the API server has parsed the turn's calls) | tool_signal (its client reports
    a call) | job_finished | model_learned (of jobs or of calls)."""
    req_id: str | None = None
    """Id of the turn; in a ``tool_signal`` the client's id."""
    job_id: str | None = None
    """Id of the job, if the signal names it."""
    calls: list[ReportedToolCall] = []
    """Calls of a ``tool_gap_started``; empty: the turn ended with an answer."""
    state: str | None = None
    """State in a ``tool_signal``: started | progress | finished | cancelled."""
    call_id: str | None = None
    """Id of one of the parallel calls; None: all of them."""
    tool: str | None = None
    """Name of the tool that is called."""
    expected_s: float | None = None
    """Expected seconds of the call, as reported when it starts."""
    remaining_s: float | None = None
    """Remaining seconds of the call, as reported."""
    fraction: float | None = None
    """Fraction of the call that is done, in [0, 1]."""
    model: str | None = None
    """The model of a ``model_learned``, as the trainer wrote it."""
    receipt: Receipt | None = None
    """The policy's new decision about the turn; None: it does not know this turn."""


class PauseEvent(msgspec.Struct, tag_field="type", tag="pause", kw_only=True):
    """Input: the scheduler was paused or resumed."""

    now: float
    state: str
    """One of: unpaused | paused_new (nothing is admitted) | paused_all (nothing is scheduled)."""


class PrefixCacheReset(msgspec.Struct, tag_field="type", tag="prefix_cache_reset", kw_only=True):
    """Input: all pins were ended and all cached blocks evicted, on every tier."""

    now: float
    done: bool
    """False: nothing was evicted, because requests had blocks."""


class EncoderCacheReset(msgspec.Struct, tag_field="type", tag="encoder_cache_reset", kw_only=True):
    """Input: the operator cleared the cached pictures and clips that no request needs."""

    now: float


class IdleEvent(msgspec.Struct, tag_field="type", tag="idle", kw_only=True):
    """Input: the scheduler was called between steps to end the pins that are due."""

    now: float


class StepOutput(msgspec.Struct, tag_field="type", tag="step_output", kw_only=True, omit_defaults=True):
    """Input: the result of a step arrived. Requests that ended meanwhile may be among those it names."""

    step: int
    """The step that produced this: the last one decided, or with ``async_scheduling`` the one before it, in a
    pipeline one of the last ``num_stages``. Transfers may be reported in between."""
    now: float
    sampled: list[str] | None = None
    """Requests that got tokens, in the worker's order; None: all that the step scheduled, in its order."""
    num_tokens: dict[str, int] = {}
    """Number of tokens of the requests that did not get exactly one."""
    ended: dict[str, str] = {}
    """Requests that ended with these tokens: stop (by one, their grammar or a repetition) | length | error
    (no token could follow)."""
    forgotten: list[str] = []
    """Those of them with non-finite logits: their blocks are evicted from the prefix cache."""
    blocks: dict[str, bytes] = {}
    """Names of the blocks that these tokens filled, ``BLOCK_NAME_BYTES`` each, by request."""
    finished_loads: list[int] = []
    """Finished loads from the host tier and from disk, numbered from 1 in the order of their start."""
    failed_loads: list[int] = []
    """Loads that failed: their tokens are recomputed."""
    finished_disk_writes: list[int] = []
    """Disk slots that have been written."""
    failed_disk_writes: list[int] = []
    """Disk slots that could not be written and are not used again."""
    released_leases: list[str] = []
    """Requests whose leased KV has been read, or is not needed."""
    renewed_leases: list[str] = []
    """Requests whose leased KV is not yet read: their leases are renewed for the same time."""
    receipts: list[Receipt] = []
    """Receipts of the turns that ended, in their order."""


class DraftsProposed(msgspec.Struct, tag_field="type", tag="drafts", kw_only=True):
    """Input: draft tokens for the next step to verify, before those that do not fit are cut."""

    now: float
    num_tokens: dict[str, int]
    """Number of drafts by request."""


class EngineClosed(msgspec.Struct, tag_field="type", tag="closed", kw_only=True):
    """Input: the engine stops, and all pins end."""

    now: float


class StepSnapshot(msgspec.Struct, tag_field="type", tag="step_snapshot", kw_only=True):
    """The state at the start of a step, before it decides anything."""

    step: int
    now: float
    running: list[str]
    """Running requests, in the scheduler's order."""
    num_waiting: int
    """Requests in the queue, except those that load or await a grammar."""
    waiting_head: list[str]
    """The first few waiting requests, in order (all would be linear in the queue)."""
    free_blocks: int
    """Blocks used by no request and no pin, including cached ones."""
    empty_blocks: int | None = None
    """Free blocks that cache nothing."""
    cached_blocks: int
    """Cached blocks, free or not."""
    pinned_blocks: int
    """Pinned blocks; a block in two pins is counted twice."""
    num_pins: int
    """Number of pins."""
    total_blocks: int
    """Usable blocks of the pool."""
    token_budget: int
    """Maximum number of tokens that this step may schedule; 0 while all is paused."""
    free_states: int = 0
    """State slots used by no request and no pin, including cached ones; 0 without states."""
    num_loading: int = 0
    """Requests that have their blocks and wait for a load to end, or for the step after it."""
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
    """Requests that were in the batch already and are scheduled."""
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
    """Number of these that are read from disk, by request id; requests without any are omitted."""
    stored_blocks: int = 0
    """Blocks that this step offloads to the host tier."""
    written_blocks: int = 0
    """Blocks evicted from the host tier whose write to disk starts."""
    drafts: dict[str, int] = {}
    """Number of ``tokens`` that are drafts, by request id; they follow at least one known token."""
    remote_loads: dict[str, int] = {}
    """Number of blocks of ``loads`` that come from another server, by request id; others are omitted."""
    leased_blocks: int = 0
    """Blocks that are leased to other servers from this step on."""
    ended_leases: int = 0
    """Leases that have ended since the previous step."""


class PrefixCacheEvent(msgspec.Struct, tag_field="type", tag="prefix_cache_event", kw_only=True):
    """A request joined the batch: how many of its tokens were cached."""

    step: int
    now: float
    req_id: str
    job_id: str | None
    hit_tokens: int
    """Tokens found in the pool or loaded to it."""
    num_prompt_tokens: int
    """Length of its prompt."""
    num_tokens: int
    """Length of the prompt plus the output until now (only a resumed request has some)."""
    resumed: bool
    """Whether it ran before and was preempted."""
    loaded_tokens: int = 0
    """Number of the hit tokens that were loaded from the host tier or from disk."""
    disk_tokens: int = 0
    """Number of the loaded tokens that were read from disk."""
    without_state_tokens: int = 0
    """Tokens after the hit whose KV was cached, too, but not the state of the layers that keep one."""


class PinEvent(msgspec.Struct, tag_field="type", tag="pin_event", kw_only=True, omit_defaults=True):
    """A decision about a pin with all its inputs, or how the pin ended."""

    now: float
    kind: str
    """One of: created | decided | refused | shrunk | ended."""
    pin_id: int | None = None
    """Id of the pin; None if nothing is pinned."""
    job_id: str
    req_id: str
    num_blocks: int
    """Blocks of the pin (for ``shrunk``: the blocks it lost)."""
    deadline_s: float | None = None
    """For ``created`` and ``ended``: when it was to expire, on the clock of ``now``."""
    ttl_s: float | None = None
    """For ``decided``: seconds to pin, from the end of the turn."""
    rule: str | None = None
    """For ``decided``: the policy's rule."""
    reason: str | None = None
    """Why, in a few words."""
    inputs: dict[str, float | int | str | bool | None] = {}
    """Inputs of the rule; the same inputs give the same decision."""
    cause: str | None = None
    """For ``ended``: handed_over | expired | revoked | released | superseded (the job went on without it).
    For ``shrunk``: superseded, or None if it was revoked."""
    held_s: float | None = None
    """For ``ended``: seconds for which it was pinned, from the end of the turn."""
    needed_blocks: int | None = None
    """For ``ended``: how many of its blocks would have been evicted without it, least recently used first;
    None if that is unknown."""
    by: str | None = None
    """Request for which it was revoked or shrunk, or which superseded it. None: another pin, by a limit."""


class JobEvent(msgspec.Struct, tag_field="type", tag="job_event", kw_only=True, omit_defaults=True):
    """An event of a job: a turn arrived, started to run, ended; a tool gap opened or closed."""

    now: float
    kind: str
    """One of: turn_arrived | turn_parked (its job may not start yet) | turn_admitted | turn_ended |
    turn_aborted | tools_started | prewarmed (another request has computed more of the next turn's prompt) |
    finished | forgotten (the job is no longer remembered); or a client's report of its calls:
    reported_started | reported_progress | reported_finished | reported_cancelled."""
    job_id: str
    req_id: str | None = None
    turn: int = 0
    """Number of the turn in its job, from 1; for ``finished``: the number of turns."""
    continues: str | None = None
    """For ``turn_arrived`` and ``prewarmed``: the request of the turn that it continues."""
    repeats: str | None = None
    """For ``turn_arrived``: an earlier request of the same turn, which its client aborted."""
    waits_since_s: float | None = None
    """For ``turn_arrived``: when that request began to wait, if it still waited; this one keeps its place."""
    earlier_id: str | None = None
    """For ``turn_arrived``: the job's id in all earlier records, if its client named it with this turn."""
    num_prompt_tokens: int = 0
    """Length of the turn's prompt."""
    num_output_tokens: int = 0
    """Output tokens until now; all of them when the turn has ended."""
    num_known_tokens: int = 0
    """Prompt tokens, in full blocks, that the turn it continues had computed."""
    cached_tokens: int = 0
    """Prompt tokens that were cached when it was first admitted."""
    recomputed_tokens: int = 0
    """Prompt tokens recomputed although an earlier turn of the job had their KV."""
    tools: list[str] = []
    """Tool keys as the estimator names them."""
    gap_s: float | None = None
    """For ``turn_arrived``: time since the end of the turn that it continues."""
    diverged_at_token: int | None = None
    """Where the prompt diverges from what the job had computed, in full blocks."""
    diverged_tokens: int = 0
    """Tokens of the job after that point, whose KV is no longer useful."""
    supersedes: str | None = None
    """For a turn that goes on without the end of an earlier one: the request of that earlier turn."""
    superseded_tokens: int = 0
    """Tokens of that turn whose blocks are evicted first from now on, unless they are in use."""
    predicted_excess_s: float | None = None
    """For ``turn_arrived``: seconds of service beyond a usual job's, predicted by a trusted learned model."""
    reported_remaining_s: float | None = None
    """Remaining seconds of the calls, as the client reported."""
    needed_blocks: int = 0
    """For ``turn_parked``: blocks that the jobs already started are predicted to need, ``ahead_s`` later."""
    own_blocks: int = 0
    """For ``turn_parked``: blocks that the job itself is predicted to need then."""
    ahead_s: float = 0.0
    """For ``turn_parked``: how many seconds later they are predicted to need most."""
    allowed_blocks: int = 0
    """For ``turn_parked``: the maximum number of blocks that they and this job may need."""


class TraceGap(msgspec.Struct, tag_field="type", tag="gap", kw_only=True):
    """Marks dropped events: what follows cannot be replayed."""

    dropped: int
    """Number of dropped events."""


class TraceEnd(msgspec.Struct, tag_field="type", tag="end", kw_only=True):
    """Last line of a trace that was closed normally: a trace without it was cut off."""

    written: int
    """Events before this one, in all parts; repeated headers are not counted."""
    dropped: int
    """Events that were emitted but are not in the trace."""


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
"""Each of these ends the group of events that one call of the scheduler caused; a ``StepDecision`` ends that
of the call that planned a step at ``now``."""

TraceEvent = (
    TraceHeader | StepSnapshot | PrefixCacheEvent | PinEvent | JobEvent | InputEvent | TraceGap | TraceEnd
)

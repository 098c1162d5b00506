"""The records of a scheduler trace: one tagged union, JSON lines, a schema version in the first line.

``StepSnapshot`` (before) and ``StepDecision`` (after) of one ``schedule()`` carry the same ``step``. Times
are monotonic seconds; ``TraceHeader.wall_time_s`` ties them to the calendar.

The trace holds every input of the scheduler and its policy, in the order in which they took effect: requests,
their ends from outside, signals, results of steps, and each moment at which it was asked. The record of an
input stands *behind* the events that it caused, and ends their group (``InputEvent``): whoever gives the
inputs in this order to the same code gets the same events.
"""

from __future__ import annotations

import msgspec

SCHEMA_VERSION = 3
BLOCK_NAME_BYTES = 8
"""Of a block's hash, in a trace: enough to tell blocks apart."""


class TraceHeader(msgspec.Struct, tag_field="type", tag="header", kw_only=True):
    """First line of every file of a trace: what the scheduler and its policy were made from."""

    schema_version: int = SCHEMA_VERSION
    """Of these records; version 2 is read, too (``tracing/versions.py``), others are refused."""
    wall_time_s: float
    """time.time() when the trace was opened."""
    monotonic_s: float
    """The engine's clock at the same moment."""
    from_start: bool = False
    """Whether the trace began with the engine, before its first request: only such a one can be replayed."""
    program: str = ""
    """Version of the program that wrote it."""
    machine: dict[str, str] = {}
    """What it was written with: versions of ``python``, ``numpy``, ``blas`` and ``libc``, model of ``cpu``.
    No decision rests on them."""
    policy: str = ""
    """Name of the policy, as ``--scheduling-policy`` and ``continuum simulate`` have it."""
    policy_options: dict[str, float | int | str | bool | None] = {}
    """All options of the policy by name, defaults included; an infinite number is the text ``inf``."""
    estimator_state: str | None = None
    """What the policy's estimator had learned when it started, as in its state file (JSON); None: it began
    with nothing."""
    block_size: int = 0
    """Tokens per KV block."""
    num_blocks: int = 0
    """Usable blocks of the pool."""
    num_host_blocks: int = 0
    """Copies that fit on the host tier; 0: there is none."""
    min_load_tokens: int = 0
    """Fewer tokens are recomputed rather than loaded from the host tier; 0 without one."""
    num_disk_blocks: int = 0
    """Copies that fit on disk, where the host tier puts what it drops; 0: there is none."""
    max_disk_writes: int = 0
    """Of blocks to disk, in flight at once: one more is not written."""
    disk_fixed_tokens: float = 0.0
    """To begin a read from disk takes as long as computing so many tokens."""
    disk_read_share: float = 0.0
    """To read a token's KV from disk takes this share of the time to compute it."""
    enable_prefix_caching: bool = True
    """Whether equal prefixes are found again."""
    max_model_len: int = 0
    """Most tokens of a request, prompt and output."""
    max_num_seqs: int = 0
    """Most requests running at once."""
    max_num_batched_tokens: int = 0
    """Token budget of a step."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may take several steps."""
    long_prefill_token_threshold: int = 0
    """Most prefill tokens of one request per step; 0: no limit."""
    scheduler_reserve_full_isl: bool = True
    """Whether a request is admitted only if its whole sequence fits in the free blocks."""
    async_scheduling: bool = False
    """Whether a step is decided while the one before it runs, so that its result comes after that."""
    part: int = 1
    """Which file of the trace this is: a later one repeats the header, but for this, the next field and
    ``from_start``."""
    num_events_before: int = 0
    """Events in the parts before this one; repeated headers are not counted."""


class BaseReceipt(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What the client of a turn was told about its job's KV, but for the id that names the turn."""

    job_id: str
    turn: int
    """1 for the job's first turn."""
    cached_tokens: int = 0
    """Of the prompt, when it was first admitted."""
    recomputed_tokens: int = 0
    """That an earlier turn of the job had computed."""
    pinned_tokens: int = 0
    """Held for the next turn."""
    ttl_s: float = 0.0
    """How long, from the end of the turn."""
    reason: str = ""
    """Why so long."""
    expected_tool_s: float | None = None
    """Median of what the estimator expects the calls to take, from the end of the turn."""
    previous_pin: str | None = None
    """How the pin that this turn came back to had ended: handed_over | expired | revoked | released |
    superseded."""
    gap_s: float | None = None
    """Since the job's previous turn ended."""


class Receipt(BaseReceipt, omit_defaults=True, frozen=True):
    """What the client of a turn was told about its job's KV; a part of other records."""

    req_id: str


class ToolCallSaid(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool call as the model wrote it; a part of ``SignalEvent``."""

    name: str
    """Of the tool."""
    arguments: str = ""
    """JSON text."""


class RequestArrived(
    msgspec.Struct, tag_field="type", tag="request_arrived", kw_only=True, omit_defaults=True
):
    """Input: the scheduler was given a request. Of its tokens only what the policy may look at is kept.

    The names of its prompt's full blocks are, in this order: the first ``prefix_blocks`` of an earlier
    request in this file (those up to the block named ``prefix_end``), then ``blocks``. Equal names: equal
    tokens from the very start.
    """

    now: float
    req_id: str
    external_id: str | None = None
    """As its client knows it; None: by the same id."""
    arrival_s: float
    """When the API server accepted it, on the same clock."""
    num_prompt_tokens: int
    """Length of its prompt."""
    max_tokens: int
    """Most tokens of output."""
    priority: int = 0
    """Smaller goes first, where the policy looks at it."""
    in_job: bool = False
    """Whether it may be a turn of a job; if so without ``job_id``, its job is inferred."""
    job_id: str | None = None
    """As its client said."""
    is_last_step: bool = False
    """Its client said that no turn of the job will follow."""
    tenant: str | None = None
    """With whom it shares pins, seats and the queue."""
    owner: str | None = None
    """Whose API key it came with, by name."""
    num_replies: int | None = None
    """The model's replies in the prompt; None: not counted."""
    num_results: int | None = None
    """Results of tools in the prompt; None: not counted."""
    awaits_grammar: bool = False
    """It joins the queue with the ``GrammarReady`` of its id."""
    prefix_blocks: int = 0
    """Blocks of an earlier request that its prompt begins with."""
    prefix_end: bytes = b""
    """Name of the last of them; empty if there are none."""
    blocks: bytes = b""
    """Names of the prompt's other full blocks, ``BLOCK_NAME_BYTES`` each."""
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
    """Which."""
    how: str
    """stopped (the API server found a stop string: the turn ended as by itself) | aborted | error"""
    receipts: list[Receipt] = []
    """Of the turns that ended so, in their order."""


class SignalEvent(msgspec.Struct, tag_field="type", tag="signal", kw_only=True, omit_defaults=True):
    """Input: somebody said something about a tool call or a job, and was answered with a receipt."""

    now: float
    kind: str
    """tool_gap_started (the API server has read the turn's calls) | tool_signal (its client speaks of a call)
    | job_finished"""
    req_id: str | None = None
    """The turn; by its client's id in a ``tool_signal``."""
    job_id: str | None = None
    """The job, where it was named."""
    calls: list[ToolCallSaid] = []
    """Of a ``tool_gap_started``; empty: the turn ended with an answer."""
    state: str | None = None
    """Of a ``tool_signal``: started | progress | finished | cancelled."""
    call_id: str | None = None
    """Of parallel calls, which; None: all of them."""
    tool: str | None = None
    """Name of the tool that it calls."""
    expected_s: float | None = None
    """How long the call will take from now on, as told when it starts."""
    remaining_s: float | None = None
    """How long it will still take."""
    fraction: float | None = None
    """How much of it is done, in [0, 1]."""
    receipt: Receipt | None = None
    """The policy's new decision about the turn; None: it knows no such turn."""


class PauseEvent(msgspec.Struct, tag_field="type", tag="pause", kw_only=True):
    """Input: what the scheduler may do was changed."""

    now: float
    state: str
    """unpaused | paused_new (nothing is admitted) | paused_all (nothing is scheduled)"""


class PrefixCacheReset(msgspec.Struct, tag_field="type", tag="prefix_cache_reset", kw_only=True):
    """Input: all pins were ended and all cached prefixes forgotten, on every tier."""

    now: float
    done: bool
    """False: nothing was forgotten, since requests held blocks."""


class IdleEvent(msgspec.Struct, tag_field="type", tag="idle", kw_only=True):
    """Input: outside of steps the scheduler was asked to end the pins that are due."""

    now: float


class StepOutput(msgspec.Struct, tag_field="type", tag="step_output", kw_only=True, omit_defaults=True):
    """Input: a step's result came back. Requests that ended meanwhile may be among those it names."""

    step: int
    """Whose result it is: the last one that was decided, or with ``async_scheduling`` the one before it;
    copies may be reported in between."""
    now: float
    sampled: list[str] | None = None
    """Requests that got tokens, in the worker's order; None: all that the step scheduled, in its order."""
    num_tokens: dict[str, int] = {}
    """Tokens of those that did not get exactly one."""
    ended: dict[str, str] = {}
    """Requests that ended by these tokens: stop (by a token or their grammar) | length | error (no token
    could follow)."""
    forgotten: list[str] = []
    """Those of them whose logits were no numbers: what their blocks hold is not found any more."""
    blocks: dict[str, bytes] = {}
    """Names of the blocks that these tokens filled, ``BLOCK_NAME_BYTES`` each, by request."""
    finished_loads: list[int] = []
    """Loads from the host tier and from disk that are done, counted from 1 in the order in which they
    started."""
    failed_loads: list[int] = []
    """Those that came to nothing: their tokens are computed."""
    finished_disk_writes: list[int] = []
    """Slots of the disk that have been written."""
    failed_disk_writes: list[int] = []
    """Slots that could not be written, and are not used again."""
    receipts: list[Receipt] = []
    """Of the turns that ended, in their order."""


class EngineClosed(msgspec.Struct, tag_field="type", tag="closed", kw_only=True):
    """Input: the engine stops, and all pins end."""

    now: float


class StepSnapshot(msgspec.Struct, tag_field="type", tag="step_snapshot", kw_only=True):
    """The state a step starts from, before it decides anything."""

    step: int
    now: float
    running: list[str]
    """Requests that run, in the scheduler's order."""
    num_waiting: int
    """Requests in the queue; those that load or await a grammar are not in it."""
    waiting_head: list[str]
    """The first few waiting requests, in order (all would be linear in the queue)."""
    free_blocks: int
    """Neither running nor pinned; those with a reusable prefix are counted."""
    empty_blocks: int | None = None
    """Of the free ones: those that hold no cached prefix."""
    cached_blocks: int
    """Blocks, free or not, that hold a cached prefix."""
    pinned_blocks: int
    """Held by pins; one that two of them hold is counted twice."""
    num_pins: int
    """Pins that live."""
    total_blocks: int
    """Usable blocks of the pool."""
    token_budget: int
    """Most tokens that this step may schedule; 0 while all is paused."""
    num_loading: int = 0
    """Requests that have their blocks and wait for a load, or for the step after it."""
    host_blocks: int = 0
    """Copies on the host tier."""
    disk_blocks: int = 0
    """Copies on disk; one may be on the host tier, too."""


class StepDecision(msgspec.Struct, tag_field="type", tag="step_decision", kw_only=True):
    """What the step with the same number decided."""

    step: int
    now: float
    new: list[str]
    """Admitted for the first time."""
    resumed: list[str]
    """Admitted again after they were preempted."""
    running: list[str]
    """That ran before and are scheduled again."""
    preempted: list[str]
    """That lost their blocks and wait again."""
    tokens: dict[str, int]
    """Request id to scheduled tokens."""
    total_tokens: int
    """Sum of ``tokens``."""
    free_blocks: int
    """After the step was planned."""
    loads: dict[str, int] = {}
    """Request id to blocks that start to be loaded from the host tier or from disk."""
    disk_loads: dict[str, int] = {}
    """Of these: those that are read from disk; requests without one are left out."""
    stored_blocks: int = 0
    """Blocks that this step copies to the host tier."""
    written_blocks: int = 0
    """Blocks dropped by the host tier that start to be written to disk."""


class PrefixCacheEvent(msgspec.Struct, tag_field="type", tag="prefix_cache_event", kw_only=True):
    """A request joined the batch: how much of it was found in the cache."""

    step: int
    now: float
    req_id: str
    job_id: str | None
    hit_tokens: int
    """On the device, or loaded to it."""
    num_prompt_tokens: int
    """Length of its prompt."""
    num_tokens: int
    """Prompt plus any output so far (a resumed request has some)."""
    resumed: bool
    """It ran before and was preempted."""
    loaded_tokens: int = 0
    """Of the hit: loaded from the host tier or from disk."""
    disk_tokens: int = 0
    """Of the loaded ones: read from disk."""


class PinEvent(msgspec.Struct, tag_field="type", tag="pin_event", kw_only=True, omit_defaults=True):
    """A decision about a pin with all its inputs, or how the pin ended."""

    now: float
    kind: str
    """created | decided | refused | shrunk | ended"""
    pin_id: int | None = None
    """None where nothing is held."""
    job_id: str
    req_id: str
    num_blocks: int
    """Blocks held by the pin (lost blocks for ``shrunk``)."""
    deadline_s: float | None = None
    """For ``created`` and ``ended``: when it was to expire, on the clock of ``now``."""
    ttl_s: float | None = None
    """For ``decided``: to be held so long, from the end of the turn."""
    rule: str | None = None
    """For ``decided``: which rule of the policy."""
    reason: str | None = None
    """Why, in a few words."""
    inputs: dict[str, float | int | str | bool | None] = {}
    """What the rule was given; feeding it back gives the same decision."""
    cause: str | None = None
    """For ``ended``: handed_over | expired | revoked | released | superseded (the job went on without it).
    For ``shrunk``: superseded, or None where it was revoked."""
    held_s: float | None = None
    """For ``ended``: since the turn ended."""
    by: str | None = None
    """Request for which it was revoked, or shrunk; of one that is superseded: that goes on without it. None:
    for another pin, as all may hold only so much."""


class JobEvent(msgspec.Struct, tag_field="type", tag="job_event", kw_only=True, omit_defaults=True):
    """A job's life: a turn arrived, started to run, ended; a tool gap opened or closed."""

    now: float
    kind: str
    """turn_arrived | turn_parked (its job may not begin yet) | turn_admitted | turn_ended | turn_aborted |
    tools_started | finished | forgotten (nothing more is known of the job); and what a client says of its
    calls: reported_started | reported_progress | reported_finished | reported_cancelled"""
    job_id: str
    req_id: str | None = None
    turn: int = 0
    """Number of the turn in its job, from 1; for ``finished``: how many there were."""
    continues: str | None = None
    """For ``turn_arrived``: the request of the turn that it continues."""
    repeats: str | None = None
    """For ``turn_arrived``: a request of the same turn, which its client had cut."""
    waits_since_s: float | None = None
    """For ``turn_arrived``: since when that one had waited, if it still did; this one keeps its place."""
    earlier_id: str | None = None
    """For ``turn_arrived``: the job id of the job's records up to the turn in which its client named it."""
    num_prompt_tokens: int = 0
    """Length of the turn's prompt."""
    num_output_tokens: int = 0
    """So far; all of them when the turn has ended."""
    num_known_tokens: int = 0
    """Prompt tokens, in full blocks, that the turn it continues had computed."""
    cached_tokens: int = 0
    """Of the prompt, found when it was first admitted."""
    recomputed_tokens: int = 0
    """Recomputed, though an earlier turn of the job had them."""
    tools: list[str] = []
    """Tool keys as the estimator sees them."""
    gap_s: float | None = None
    """For ``turn_arrived``: since the turn that it continues ended."""
    diverged_at_token: int | None = None
    """Where the prompt parts from what the job had computed, in full blocks."""
    diverged_tokens: int = 0
    """Tokens of the job beyond that, of no use any more."""
    supersedes: str | None = None
    """For a turn that shows its job to go on without the end of an earlier one: the request of that one."""
    superseded_tokens: int = 0
    """So many tokens of it that are reused first from now on, where nobody else holds them."""
    reported_remaining_s: float | None = None
    """Seconds that the client says its calls will still take."""
    needed_blocks: int = 0
    """For ``turn_parked``: that the jobs begun are likely to need."""
    allowed_blocks: int = 0
    """For ``turn_parked``: the most that they and this one may need."""


class TraceGap(msgspec.Struct, tag_field="type", tag="gap", kw_only=True):
    """In the place of events that were dropped: what follows cannot be replayed."""

    dropped: int
    """How many."""


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
    | IdleEvent
    | StepDecision
    | StepOutput
    | EngineClosed
)
"""Each ends the group of events that one call of the scheduler brought about; a ``StepDecision`` that of the
call which asked for a step at ``now``."""

TraceEvent = (
    TraceHeader | StepSnapshot | PrefixCacheEvent | PinEvent | JobEvent | InputEvent | TraceGap | TraceEnd
)

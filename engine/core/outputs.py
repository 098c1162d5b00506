"""The step plan sent to the worker, and what the worker sends back. Plain lists, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.core.drafts.proposal import Proposal
from engine.records.kv_transfer import PrefixSource
from engine.records.messages import MediaSpan, TokenLogprobs
from engine.records.pooling import Pooled, PoolingParams
from engine.records.routed_experts import StepRouting
from engine.records.sampling_params import SamplingParams


@dataclass(slots=True)
class NewRequestData:
    """All about a request that the worker sees for the first time."""

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    adapter: str | None = None
    """Key of its adapter."""
    pooling: PoolingParams | None = None
    media: Sequence[MediaSpan] = ()
    """Its prompt's pictures and clips."""


@dataclass(slots=True)
class CachedRequestData:
    """Requests the worker already knows: only what changed, as parallel lists.

    ``new_block_ids`` are appended to the request's block table; for a request in
    ``resumed_req_ids`` they replace it, and ``resumed_token_ids`` holds all its tokens.
    """

    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    resumed_token_ids: dict[str, list[int]] = field(default_factory=dict)
    new_block_ids: list[list[int]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    new_token_ids: list[Sequence[int]] = field(default_factory=list)
    """The step's tokens after the prompt, for stages of a pipeline that did not sample them; empty with one
    stage."""


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """KV blocks to copy between the device pool and the host pool.

    Block ``block_ids[i]`` goes with slot ``host_slots[i]``. No block and no slot is named twice.
    """

    block_ids: Sequence[int] = ()
    host_slots: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.block_ids)


NO_COPIES = BlockCopies()


@dataclass(frozen=True, slots=True)
class DiskReads:
    """KV blocks to read from the disk pool into the device pool: block ``block_ids[i]`` from slot
    ``disk_slots[i]``."""

    block_ids: Sequence[int] = ()
    disk_slots: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.block_ids)


NO_DISK_READS = DiskReads()


@dataclass(frozen=True, slots=True)
class DiskWrites:
    """Slots of the host pool to write to the disk pool: ``host_slots[i]`` to ``disk_slots[i]``, which names
    the write, since a slot takes one at a time."""

    host_slots: Sequence[int] = ()
    disk_slots: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.disk_slots)


NO_DISK_WRITES = DiskWrites()


@dataclass(frozen=True, slots=True)
class RemoteReads:
    """KV blocks to fetch from another server, or from the folder that servers share: block ``block_ids[i]``
    is named ``names[i]`` there."""

    source: PrefixSource
    names: Sequence[bytes]
    block_ids: Sequence[int]
    owner: str = ""
    """Owner of the request: owners take turns."""

    def __len__(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class KVSaves:
    """KV blocks to keep in the folder that servers share: block ``block_ids[i]`` as ``names[i]``, unless it
    is there already."""

    names: Sequence[bytes] = ()
    block_ids: Sequence[int] = ()
    useless: Sequence[bytes] = ()
    """Blocks to delete there, as their content is wrong."""

    def __bool__(self) -> bool:
        return bool(self.names or self.useless)


NO_SAVES = KVSaves()


@dataclass(frozen=True, slots=True)
class NewKVLease:
    """KV blocks that another server may read from now on: ids by name."""

    lease_id: str
    blocks: Mapping[bytes, int]


@dataclass(frozen=True, slots=True)
class KVLoad:
    """Blocks of one request to be filled from the host pool and from disk, or else from another server.

    It has a separate id: the request may be aborted, and its id used again, while the copy runs.
    """

    load_id: int
    request_id: str
    copies: BlockCopies
    reads: DiskReads = NO_DISK_READS
    remote: RemoteReads | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.copies) + len(self.reads) + (0 if self.remote is None else len(self.remote))


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that grammars forbid to some requests of a step."""

    req_ids: Sequence[str]
    """Request of each row. One with drafts has a further row for each: the masks after them, in order."""
    forbidden: npt.NDArray[np.bool_]
    """[len(req_ids), vocab_size]"""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by id, of requests whose grammar cannot be followed further: they end, whatever is sampled."""


NO_MASKS = TokenMasks((), np.empty((0, 0), np.bool_))
"""The masks of a step whose requests with a grammar have all ended meanwhile."""


@dataclass(slots=True)
class SchedulerOutput:
    """What to run in one step.

    The worker keeps this order: ``ended_kv_leases`` end, ``kv_leases`` begin, ``kv_disk_writes`` start,
    ``state_stores`` are copied, ``kv_loads`` start, the tokens are computed, ``kv_stores`` and ``kv_saves``
    copy what is then computed. A load may take several steps; the scheduler leaves its blocks and slots alone
    until it is reported. Blocks that a step uses are not reused before its output was taken. A store is not
    reported: it is done when the step is, or the worker makes a later write of that block, or a later load
    from that slot, wait for it. Writes to disk may take several steps, too.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    """Number of tokens by request id, in scheduling order (running, then resumed and new): a request admitted
    by this plan may read blocks that earlier ones fill in this step, but none that later ones fill."""
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    """Requests that ended since the last step: the worker drops its state of them."""
    preempted_req_ids: set[str]
    kv_loads: Sequence[KVLoad] = ()
    """Blocks to load from host to device. A plan without tokens may have some."""
    kv_stores: BlockCopies = NO_COPIES
    """Blocks to write from device to host."""
    state_stores: BlockCopies = NO_COPIES
    """Blocks of states to write from device to host before the plan overwrites them."""
    kv_disk_writes: DiskWrites = NO_DISK_WRITES
    """Blocks to write from host to disk."""
    kv_saves: KVSaves = NO_SAVES
    """Blocks to save in the folder that servers share, once they are computed. Not reported."""
    kv_leases: Sequence[NewKVLease] = ()
    """Blocks that other servers may read from now on."""
    ended_kv_leases: Sequence[str] = ()
    """Ids of leases whose blocks may be overwritten from this step on."""
    masks: Future[TokenMasks] | None = None
    """Masks, filled while the step runs or once the previous step's tokens are known: the worker waits for
    them before it samples. None if no request sampled in this step has a grammar; requests that have ended
    meanwhile are left out."""
    state_slots: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """For a model that has layers with states, by request id: the slot whose state the step reads, 0 for
    none, and the slot to which it writes. Steps run in the order of their plans, so a slot may be reused
    while a step that uses it is under way."""
    scheduled_spec_decode_tokens: Mapping[str, list[int]] = field(default_factory=dict)
    """Draft tokens, by request id: the last of the request's tokens in this step. The worker samples after
    the last known token and after each draft, and accepts drafts while they equal the sampled tokens."""
    scheduled_encoder_inputs: Mapping[str, list[int]] = field(default_factory=dict)
    """Indices of the pictures and clips that are encoded before the tokens are computed, by request id."""
    free_encoder_mm_hashes: Sequence[str] = ()
    """Content hashes of those whose encoder outputs are dropped, before that."""
    trace_step: int | None = None
    """Number of the step in the trace, if there is one."""
    in_wave: bool = False
    """Whether all cores that share experts run this step, with tokens or without."""

    @property
    def concerns_worker(self) -> bool:
        """Whether the worker has something to compute, to drop or to end."""
        return bool(
            self.total_num_scheduled_tokens
            or self.in_wave
            or self.finished_req_ids
            or self.preempted_req_ids
            or self.ended_kv_leases
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of consecutive prompt tokens, from a step that computes the tokens before them."""

    first: int
    """The place in the prompt of the first of them."""
    entries: list[TokenLogprobs]


@dataclass(slots=True)
class ModelRunnerOutput:
    """What one step sampled. ``sampled_token_ids[i]`` belongs to ``req_ids[i]``: empty for a request whose
    prompt is not yet fully computed, else accepted drafts and one more token."""

    req_ids: list[str]
    sampled_token_ids: list[list[int]]
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities of the requests that want them, one entry per sampled token."""
    finished_loads: Sequence[int] = ()
    """Ids of loads, of this plan or an earlier one, whose blocks are now filled. Each load ends once."""
    failed_loads: Sequence[int] = ()
    """Ids of loads that failed: their tokens will be computed, their slots are forgotten."""
    finished_disk_writes: Sequence[int] = ()
    """Slots of the disk that now hold what was to be written there, by this plan or an earlier one."""
    failed_disk_writes: Sequence[int] = ()
    """Slots that could not be written: they are not used again."""
    released_kv_leases: Sequence[str] = ()
    """Ids of leases whose blocks have been read, or are not wanted."""
    renewed_kv_leases: Sequence[str] = ()
    """Ids of leases whose readers need more time."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by id, of requests for which no token could be chosen: they end, whatever is sampled."""
    routing: StepRouting | None = None
    """The experts of the step's tokens, if they are to be returned."""
    drafts: Mapping[str, Proposal] = field(default_factory=dict)
    """Drafts that a drafter in the worker proposes next, by request id."""
    prompt_logprobs: Mapping[str, PromptLogprobs] = field(default_factory=dict)
    """Prompt log-probabilities of the requests that want them, by request id."""
    pooled: Mapping[str, Pooled] = field(default_factory=dict)
    """Answers of a pooling model, by request id; the sampled tokens are placeholders then."""
    waves_ended: int = 0
    """How many waves are over, if the step was one of a wave."""


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], sampled_token_ids=[])

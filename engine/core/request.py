"""One request inside the core: its tokens, its progress, its state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from engine.core.kv_cache.block_hash import NO_CONTEXT, BlockHash, BlockHasher, HashContext
from engine.core.token_grammar import TokenGrammar
from engine.records.kv_transfer import KVTransfer, SavedPrefix
from engine.records.messages import (
    EngineCoreRequest,
    FinishReason,
    JobRef,
    MediaSpan,
    TokenLogprobs,
    TurnPrefix,
)
from engine.records.pooling import PoolingParams
from engine.records.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    """Life of a request; everything after PREEMPTED is finished."""

    WAITING = 1
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 2
    """Its grammar is being compiled; it has nothing yet."""
    WAITING_FOR_REMOTE_KVS = 3
    """It has its blocks, and part of them is being loaded from another tier."""
    RUNNING = 4
    PREEMPTED = 5
    FINISHED_STOPPED = 6
    FINISHED_LENGTH_CAPPED = 7
    FINISHED_ABORTED = 8
    FINISHED_ERROR = 9
    FINISHED_REPETITION = 10

    @property
    def finished(self) -> bool:
        return self > RequestStatus.PREEMPTED

    @property
    def complete(self) -> bool:
        """Whether the model's answer is complete, so that the turn has ended."""
        return self in _COMPLETE

    @property
    def finish_reason(self) -> FinishReason | None:
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}
_COMPLETE = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


@dataclass(slots=True)
class KnownPrefix:
    """Tokens of a request that has ended, and the hashes of their blocks in its context.

    Its holder may make the lists longer.
    """

    request_id: str
    token_ids: list[int]
    block_hashes: list[BlockHash]
    context: HashContext

    def cut(self, prefix: TurnPrefix, block_size: int) -> KnownPrefix:
        """The first of these tokens, under the prefix's id; a copy if fewer, as the lists only grow."""
        token_ids = self.token_ids
        block_hashes = self.block_hashes
        if len(token_ids) > prefix.num_tokens:
            token_ids = token_ids[: prefix.num_tokens]
            block_hashes = block_hashes[: prefix.num_tokens // block_size]
        return KnownPrefix(prefix.request_id, token_ids, block_hashes, self.context)


class Request:
    """A request as the scheduler sees it.

    There is no prefill or decode phase: a step lets ``num_computed_tokens`` catch up with ``num_tokens``
    (prompt plus output so far) and the places of tokens that are being sampled, and run ahead of them by
    drafts, of which only accepted ones stay.
    """

    __slots__ = (
        "_block_hasher",
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "continues",
        "ending_token_ids",
        "external_id",
        "first_scheduled_time",
        "first_token_time",
        "grammar",
        "hash_context",
        "job",
        "keeps_tokens",
        "kv_transfer",
        "max_tokens",
        "num_accepted_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_disk_tokens",
        "num_draft_tokens",
        "num_drafts_under_way",
        "num_external_computed_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "owner",
        "pooling",
        "priority",
        "prompt_logprobs",
        "repetition_detection",
        "request_id",
        "sampling_params",
        "spec_token_ids",
        "status",
        "stop_reason",
        "tenant",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        arrival_time: float,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        media: Sequence[MediaSpan] = (),
        job: JobRef | None = None,
        block_hasher: BlockHasher | None = None,
        external_id: str | None = None,
        kv_transfer: KVTransfer | None = None,
        pooling: PoolingParams | None = None,
        before: KnownPrefix | None = None,
        keeps_tokens: bool = False,
    ) -> None:
        """``before``: the tokens before those that are given; its lists become the request's."""
        self.request_id = request_id
        self.external_id = external_id or request_id
        """The id by which its client knows it."""
        self.sampling_params = sampling_params
        self.pooling = pooling
        self.arrival_time = arrival_time
        self.priority = priority
        self.job = job
        self.kv_transfer: KVTransfer | SavedPrefix | None = kv_transfer
        """The source of its prefix, or the order to lease its KV out; None once a load has ended."""
        self.tenant = (job and job.tenant) or ""
        """Tenant whose share of the engine it uses; all requests without a name share one."""
        self.owner = (job and job.owner) or ""
        """Name of the API key it came with; empty: no owner."""

        self.continues = None if before is None else TurnPrefix(before.request_id, len(before.token_ids))
        """The turn that it continues."""
        self.keeps_tokens = keeps_tokens
        self.all_token_ids = list(prompt_token_ids) if before is None else before.token_ids
        if before is not None:
            self.all_token_ids += prompt_token_ids
        self.num_prompt_tokens = len(self.all_token_ids)
        assert sampling_params.max_tokens is not None, "the InputProcessor fills in max_tokens"
        self.max_tokens = sampling_params.max_tokens
        self.ending_token_ids = sampling_params.ending_token_ids
        self.repetition_detection = sampling_params.repetition_of_output
        self.prompt_logprobs: list[TokenLogprobs] = []  # of known tokens after the first

        self.status = (
            RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            if sampling_params.constrained
            else RequestStatus.WAITING
        )
        self.grammar: TokenGrammar | None = None
        """The grammar that its output must follow, once that is compiled."""
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens: int | None = None
        """Prefix-cache hit when first admitted, with what was loaded from another tier; None before."""
        self.num_external_computed_tokens = 0
        """Tokens loaded from another tier, among those computed when last admitted."""
        self.num_disk_tokens = 0
        """Tokens read from disk, among the external ones."""
        self.num_output_placeholders = 0
        """Places kept for tokens that a step under way samples, and that the next one may compute."""
        self.spec_token_ids: list[int] = []
        """Draft tokens that the next step may verify."""
        self.num_drafts_under_way = 0
        """Drafts that a step under way verifies; they count as computed until it returns."""
        self.num_draft_tokens = self.num_accepted_tokens = 0
        """Drafts that were verified; output tokens beyond one per step."""
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None

        has_context = bool(cache_salt or adapter or media)
        self.hash_context = HashContext(cache_salt, adapter, media) if has_context else NO_CONTEXT
        is_hashed = before is not None and before.context == self.hash_context
        self.block_hashes: list[BlockHash] = before.block_hashes if before is not None and is_hashed else []
        """Hashes of all full blocks, computed or not; empty without a hasher."""
        self._block_hasher = block_hasher
        self._hash_new_blocks()

    @classmethod
    def from_core_request(
        cls,
        message: EngineCoreRequest,
        block_hasher: BlockHasher | None,
        before: KnownPrefix | None = None,
    ) -> Request:
        """Make one from a message; ``before``: the turn that it continues."""
        return cls(
            message.request_id,
            message.prompt_token_ids,
            message.sampling_params,
            message.arrival_time,
            priority=message.priority,
            cache_salt=message.cache_salt,
            adapter=None if message.adapter is None else message.adapter.key,
            media=message.media,
            job=message.job,
            block_hasher=block_hasher,
            external_id=message.external_req_id,
            kv_transfer=message.kv_transfer,
            pooling=message.pooling,
            before=before,
            keeps_tokens=message.keeps_tokens,
        )

    def known_prefix(self) -> KnownPrefix:
        """All tokens of the request, which has ended, to be continued by another one."""
        return KnownPrefix(self.request_id, self.all_token_ids, self.block_hashes, self.hash_context)

    @property
    def adapter(self) -> str | None:
        """Key of its adapter."""
        return self.hash_context.adapter

    @property
    def media(self) -> Sequence[MediaSpan]:
        """Its prompt's pictures and clips."""
        return self.hash_context.media

    @property
    def salt(self) -> str:
        """Cache salt, empty if there is none; requests with different salts share nothing."""
        return self.hash_context.cache_salt or ""

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_output_steps(self) -> int:
        """Steps that the output tokens came from."""
        return self.num_output_tokens - self.num_accepted_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    def append_output_token(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        self._hash_new_blocks()

    def _hash_new_blocks(self) -> None:
        if self._block_hasher is not None:
            self._block_hasher.extend(self.block_hashes, self.all_token_ids, self.hash_context)

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.name}, {self.num_computed_tokens}/{self.num_tokens})"

"""Makes the trace events of a scheduler's inputs; called only while tracing is on.

An input's event is emitted after the events of its effects, and so ends their group. Only the tokens and
hashes that a replay needs are kept: the name of each block, once, and the tokens that a policy reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast, overload

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_leases import KVLeases
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request, RequestStatus
from engine.core.trace.steps import StepTrace
from engine.records.kv_transfer import KVLeaseOrder, RemotePrefix, SavedPrefix
from engine.records.lessons import ModelLearned
from engine.records.messages import (
    EngineCoreOutput,
    FinishReason,
    JobFinished,
    Signal,
    ToolGapStarted,
    ToolSignal,
    TurnReceipt,
)
from engine.records.row_failures import KV_SPOILED
from tracing.events import (
    BLOCK_NAME_BYTES,
    BaseReceipt,
    DraftsProposed,
    EncoderCacheReset,
    EngineClosed,
    GrammarReady,
    IdleEvent,
    PauseEvent,
    PrefixCacheReset,
    Receipt,
    ReportedToolCall,
    RequestArrived,
    RequestsEnded,
    SignalEvent,
    StepOutput,
)
from tracing.tracer import Tracer

NAME_CHARS = 32
"""Hexadecimal digits of a content hash that name a picture."""
MAX_NAMED = 1 << 18
"""How many named blocks are remembered (some 25 MB); beyond that, names are repeated."""
ENDINGS = {
    RequestStatus.FINISHED_STOPPED: "stopped",
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_ABORTED: "aborted",
    RequestStatus.FINISHED_ERROR: "error",
}


_HOW_ENDED = {reason: str(reason) for reason in FinishReason} | {FinishReason.REPETITION: "stop"}
"""End of a request by its reason; to a scheduler a repetition is a stop like any other."""


class InputTrace:
    """Emits the events; it has one method for each input of a scheduler."""

    def __init__(self, tracer: Tracer, steps: StepTrace, block_size: int) -> None:
        self._tracer = tracer
        self._steps = steps
        self._block_size = block_size
        self._named: set[BlockHash] = set()
        """Hashes of blocks whose names, and those of all blocks before them, are in the trace."""
        self._step_before = steps.number

    def begin(self) -> None:
        """Begin a trace, which has nothing in it yet."""
        self._named.clear()
        self._step_before = self._steps.number

    # ---- requests ----

    def watch(self, request: Request) -> TokenReads:
        """Note which of the request's tokens the policy reads, until ``request_arrived``."""
        reads = TokenReads(request.all_token_ids)
        request.all_token_ids = cast(list[int], reads)
        return reads

    def request_arrived(self, request: Request, reads: TokenReads, now: float) -> None:
        request.all_token_ids = reads.tokens
        job = request.job
        num_named, new = self._name(request.block_hashes)
        event = RequestArrived(
            now=now,
            req_id=request.request_id,
            external_id=request.external_id if request.external_id != request.request_id else None,
            arrival_s=request.arrival_time,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=request.max_tokens,
            priority=request.priority,
            in_job=job is not None,
            awaits_grammar=request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
            prefix_blocks=num_named,
            prefix_end=_name_of(request.block_hashes[num_named - 1]) if num_named else b"",
            blocks=_names(new),
            adapter=request.adapter,
            media=[(span.content_hash[:NAME_CHARS], span.offset, span.length) for span in request.media],
        )
        match request.kv_transfer:
            case (
                RemotePrefix(num_tokens=num_tokens, must_load=must_load)
                | SavedPrefix(num_tokens=num_tokens, must_load=must_load)
            ):
                event.remote_tokens = num_tokens
                event.must_load = must_load
            case KVLeaseOrder(lease_s=lease_s):
                event.lease_s = lease_s
        if job is not None:
            event.job_id = job.job_id
            event.parent_id = job.parent_id
            event.prewarms = job.prewarms
            event.is_last_step = job.is_last_step
            event.tenant = job.tenant
            event.num_replies = job.num_replies
            event.num_results = job.num_results
            event.owner = job.owner
            event.asked_ttl_s = job.asked_ttl_s
            event.is_silent = job.is_silent
            event.deadline_s = job.deadline_s
            event.moved = job.moved
            num_tokens = request.num_prompt_tokens
            event.tokens = reads.runs((max(0, num_tokens - 2 * self._block_size), num_tokens))
        self._tracer.emit(event)

    def _name(self, block_hashes: list[BlockHash]) -> tuple[int, list[BlockHash]]:
        """How many of a prompt's blocks are named already, and the others, which are named now."""
        if len(self._named) > MAX_NAMED:
            self._named.clear()
        # Where a block is named, all before it are: a prompt of thousands of blocks takes a dozen look-ups.
        low = 0
        high = len(block_hashes)
        while low < high:
            middle = (low + high) // 2
            if block_hashes[middle] in self._named:
                low = middle + 1
            else:
                high = middle
        new = block_hashes[low:]
        self._named.update(new)
        return low, new

    def grammar_ready(self, request: Request, now: float) -> None:
        self._tracer.emit(GrammarReady(now=now, req_id=request.request_id))

    def requests_ended(self, outputs: Sequence[EngineCoreOutput], status: RequestStatus, now: float) -> None:
        """Record requests ended from outside; ``outputs`` are of those that had not ended before."""
        if outputs:
            req_ids = [output.request_id for output in outputs]
            self._tracer.emit(
                RequestsEnded(now=now, req_ids=req_ids, how=ENDINGS[status], receipts=_receipts(outputs))
            )

    # ---- results ----

    def begin_output(
        self, result: ModelRunnerOutput, requests: Mapping[str, Request], leases: KVLeases
    ) -> OpenOutput:
        """Note which requests, by id, and leases a result concerns, before it is applied to them."""
        got = result.req_ids
        if not all(result.sampled_token_ids):
            got = [i for i, tokens in zip(got, result.sampled_token_ids, strict=True) if tokens]
        before = OpenOutput(got, [requests[i] for i in got if i in requests])
        if result.released_kv_leases or result.renewed_kv_leases:
            before.released_leases = leases.requests_of(result.released_kv_leases)
            before.renewed_leases = leases.requests_of(result.renewed_kv_leases)
        return before

    def step_output(
        self,
        before: OpenOutput,
        plan: SchedulerOutput,
        result: ModelRunnerOutput,
        outputs: Sequence[EngineCoreOutput],
        now: float,
    ) -> None:
        """Record a result that was applied; ``outputs`` are of the open requests in it, in their order."""
        event = StepOutput(
            # A plan without a number was made before the trace began; others may have been made since.
            step=self._step_before if plan.trace_step is None else plan.trace_step,
            now=now,
            finished_loads=list(result.finished_loads),
            failed_loads=list(result.failed_loads),
            finished_disk_writes=list(result.finished_disk_writes),
            failed_disk_writes=list(result.failed_disk_writes),
            released_leases=before.released_leases,
            renewed_leases=before.renewed_leases,
            receipts=_receipts(outputs),
        )
        if not before.sampled or before.sampled != list(plan.num_scheduled_tokens):
            event.sampled = before.sampled
        blocks: dict[str, bytes] = {}
        counts: dict[str, int] = {}
        ended: dict[str, str] = {}
        size = self._block_size
        for request, output in zip(before.requests, outputs, strict=True):
            num_tokens = request.num_tokens
            num_new = len(output.new_token_ids)
            if num_new == 1 and num_tokens % size and output.finish_reason is None:
                continue  # as for most requests, a replay needs to know nothing more
            if num_new != 1:
                counts[request.request_id] = num_new
            if num_tokens % size < num_new and request.block_hashes:
                blocks[request.request_id] = self._name_filled(request, (num_tokens - num_new) // size)
            if output.finish_reason is not None:
                ended[request.request_id] = _HOW_ENDED[output.finish_reason]
                if output.stop_reason in KV_SPOILED:
                    event.forgotten.append(request.request_id)
        event.blocks = blocks
        event.num_tokens = counts
        event.ended = ended
        self._tracer.emit(event)

    def _name_filled(self, request: Request, num_before: int) -> bytes:
        """Names of the blocks that the request's tokens have filled since there were ``num_before``."""
        new = request.block_hashes[num_before:]
        if not num_before or request.block_hashes[num_before - 1] in self._named:
            self._named.update(new)
        return _names(new)

    # ---- signals, and what is set ----

    def signal(self, signal: Signal, receipt: TurnReceipt | None, now: float) -> None:
        told = None if receipt is None else _receipt(receipt)
        match signal:
            case ToolGapStarted():
                calls = [ReportedToolCall(name=call.name, arguments=call.arguments) for call in signal.calls]
                event = SignalEvent(
                    now=now, kind="tool_gap_started", req_id=signal.request_id, calls=calls, receipt=told
                )
            case JobFinished():
                event = SignalEvent(now=now, kind="job_finished", job_id=signal.job_id, receipt=told)
            case ModelLearned():
                event = SignalEvent(now=now, kind="model_learned", model=signal.model)
            case ToolSignal():
                event = SignalEvent(
                    now=now,
                    kind="tool_signal",
                    req_id=signal.request_id,
                    job_id=signal.job_id,
                    state=signal.state.value,
                    call_id=signal.call_id,
                    tool=signal.tool,
                    expected_s=signal.expected_s,
                    remaining_s=signal.remaining_s,
                    fraction=signal.fraction,
                    receipt=told,
                )
        self._tracer.emit(event)

    def paused(self, state: str, now: float) -> None:
        self._tracer.emit(PauseEvent(now=now, state=state))

    def prefix_cache_reset(self, done: bool, now: float) -> None:
        self._tracer.emit(PrefixCacheReset(now=now, done=done))

    def encoder_cache_reset(self, now: float) -> None:
        self._tracer.emit(EncoderCacheReset(now=now))

    def drafts_proposed(self, proposals: Mapping[str, Sequence[int]], now: float) -> None:
        num_tokens = {request_id: len(token_ids) for request_id, token_ids in proposals.items()}
        self._tracer.emit(DraftsProposed(now=now, num_tokens=num_tokens))

    def idle(self, now: float) -> None:
        self._tracer.emit(IdleEvent(now=now))

    def closed(self, now: float) -> None:
        self._tracer.emit(EngineClosed(now=now))


@dataclass(slots=True)
class OpenOutput:
    """A result that is about to be applied."""

    sampled: list[str]
    """Ids of the requests that got tokens."""
    requests: list[Request]
    """Those of them that have not ended."""
    released_leases: list[str] = field(default_factory=list)
    renewed_leases: list[str] = field(default_factory=list)
    """Requests whose leases a reader has released or renewed."""


class TokenReads(Sequence[int]):
    """A prompt's tokens, which record which of them were read."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self._reads: list[tuple[int, int]] = []

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> list[int]: ...
    def __getitem__(self, place: int | slice) -> int | list[int]:
        whole = range(len(self.tokens))
        read = whole[place] if isinstance(place, slice) else whole[place : place + 1]
        if len(read):
            self._reads.append((min(read), max(read) + 1))
        return self.tokens[place]

    def __iter__(self) -> Iterator[int]:
        self._reads.append((0, len(self.tokens)))
        return iter(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def runs(self, tail: tuple[int, int]) -> list[tuple[int, list[int]]]:
        """All tokens that were read, and those of a tail, in order and each once."""
        runs: list[tuple[int, int]] = []
        for start, end in sorted([*self._reads, tail]):
            if runs and start <= runs[-1][1]:
                runs[-1] = (runs[-1][0], max(end, runs[-1][1]))
            else:
                runs.append((start, end))
        return [(start, list(self.tokens[start:end])) for start, end in runs]


def _name_of(block_hash: BlockHash) -> bytes:
    return block_hash[:BLOCK_NAME_BYTES]


def _names(block_hashes: Iterable[BlockHash]) -> bytes:
    return b"".join([block_hash[:BLOCK_NAME_BYTES] for block_hash in block_hashes])


def _receipts(outputs: Iterable[EngineCoreOutput]) -> list[Receipt]:
    return [_receipt(output.receipt) for output in outputs if output.receipt is not None]


def _receipt(receipt: TurnReceipt) -> Receipt:
    """A copy of the receipt as it is now, as a later decision may change it."""
    told = {name: getattr(receipt, name) for name in BaseReceipt.__struct_fields__}
    return Receipt(req_id=receipt.request_id, **told)

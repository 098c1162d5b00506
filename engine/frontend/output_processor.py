"""Converts the core's tokens to what callers read: text, stop strings, log probabilities, merged answers,
times.

It keeps one state per request. The core decides when a request ends: a stop string found here is first
reported to the core, whose response has the turn's receipt.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.clock import Clock
from engine.errors import EngineDeadError
from engine.frontend.detokenizer import IncrementalDetokenizer
from engine.frontend.kv_transfer import KVTransferDoor
from engine.frontend.logprobs import LogprobsProcessor, position_logprobs
from engine.frontend.output_collector import RequestOutputCollector
from engine.frontend.parallel_sampling import ParentRequest
from engine.frontend.request_output import CompletionOutput, PositionLogprobs, RequestOutput
from engine.frontend.stats import IterationStats, RequestStats, finished_request_stats
from engine.records.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    TokenLogprobs,
    TurnReceipt,
)
from engine.records.pooling import Pooled
from engine.records.routed_experts import ExpertArray, RoutedExperts
from engine.records.row_failures import processing_failed
from engine.records.sampling_params import RequestOutputKind
from engine.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestState:
    """State of a request between two messages of the core."""

    request: EngineCoreRequest
    external_id: str
    prompt: str | None
    detokenizer: IncrementalDetokenizer
    logprobs: LogprobsProcessor | None
    stats: RequestStats
    parent: ParentRequest | None = None
    index: int = 0
    collector: RequestOutputCollector | None = None
    stop_string: str | None = None
    """The stop string that was found; the core has been notified and has not confirmed it yet."""
    routed_experts: RoutedExperts | None = None
    """The experts of the request's tokens, once it has ended."""
    kv_transfer_params: dict[str, Any] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    pooled: Pooled | None = None
    late_by_s: float | None = None
    stream_interval: int = 1
    """Tokens per output after the first output, until the end."""
    num_told: int = 0
    """Number of tokens that the caller has received."""

    def ended_by(self, token_ids: list[int]) -> bool:
        """Whether the last token ended the stopped request; if not, its grammar did."""
        return bool(token_ids) and token_ids[-1] in self.request.sampling_params.ending_token_ids

    def make_output(
        self,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None = None,
        receipt: TurnReceipt | None = None,
    ) -> RequestOutput | None:
        """Returns the next output for the caller; None if there is none yet."""
        kind = self.request.sampling_params.output_kind
        if finish_reason is None and (kind is RequestOutputKind.FINAL_ONLY or not self._is_due()):
            return None
        answer = self._completion(finish_reason, stop_reason, delta=kind is RequestOutputKind.DELTA)
        receipt = self._receipt_of_all(receipt)
        answers = [answer]
        finished = answer.finished
        if self.parent is not None:
            answers, finished = self.parent.merge(answer)
            if not answers:
                return None
        return RequestOutput(
            request_id=self.external_id,
            prompt=self.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=answers,
            finished=finished,
            num_cached_tokens=self.stats.num_cached_tokens,
            receipt=receipt,
            metrics=self.stats,
            kv_transfer_params=self.kv_transfer_params,
            prompt_logprobs=self.prompt_logprobs if self.parent is None else self.parent.prompt_logprobs,
            pooled=self.pooled,
            late_by_s=self.late_by_s if self.parent is None else self.parent.late_by_s,
        )

    def _is_due(self) -> bool:
        """Whether enough tokens have arrived since the last output; the first is due at once."""
        num_tokens = self.stats.num_generation_tokens
        if self.num_told and num_tokens < self.num_told + self.stream_interval:
            return False
        self.num_told = num_tokens
        return True

    def _completion(
        self, finish_reason: FinishReason | None, stop_reason: int | str | None, *, delta: bool
    ) -> CompletionOutput:
        text, token_ids = self.detokenizer.next_output(finished=finish_reason is not None, delta=delta)
        positions = None
        if self.logprobs is not None:
            positions = list(self.logprobs.positions)
            if delta:
                self.logprobs.positions.clear()
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.logprobs.cumulative if self.logprobs is not None else None,
            logprobs=positions,
            finish_reason=None if finish_reason is None else str(finish_reason),
            stop_reason=stop_reason,
            routed_experts=self._experts_of_answer(),
        )

    def _experts_of_answer(self) -> ExpertArray | None:
        """The experts of the answer's tokens, without those that the core sampled after a stop string."""
        if self.routed_experts is None:
            return None
        num_tokens = self.stats.num_prompt_tokens + self.stats.num_generation_tokens
        start = self.request.sampling_params.routed_experts_prompt_start
        return self.routed_experts.array()[: num_tokens - 1 - start]

    def _receipt_of_all(self, receipt: TurnReceipt | None) -> TurnReceipt | None:
        """The receipt with the caller's id; for several answers, with their summed counts."""
        if receipt is None:
            return None
        if self.parent is not None:
            receipt = self.parent.receipt_of_ended(receipt)
        return msgspec.structs.replace(receipt, request_id=self.external_id)


@dataclass(slots=True)
class ProcessedOutputs:
    """The results of one message of the core."""

    iteration_stats: IterationStats
    request_outputs: list[RequestOutput] = field(default_factory=list)
    """Outputs of requests without a collector."""
    stopped_ids: list[str] = field(default_factory=list)
    """Requests that reached a stop string; the core must be notified."""
    failed_ids: list[str] = field(default_factory=list)
    """Requests that failed here while they still run; the core must abort them."""


class OutputProcessor:
    """All requests of one API server process."""

    kv_transfer = KVTransferDoor()
    """Writes the params of KV leases for clients; set before the first request."""

    def __init__(
        self, tokenizer: Tokenizer, clock: Clock, *, log_stats: bool = True, stream_interval: int = 1
    ) -> None:
        """``stream_interval``: see ``SchedulerConfig``."""
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._clock = clock
        self._log_stats = log_stats
        self._states: dict[str, RequestState] = {}
        self._children: dict[str, list[str]] = {}
        """Ids of unfinished core requests, by the request id of the InputProcessor."""
        self._by_external_id: defaultdict[str, list[str]] = defaultdict(list)
        self._aborted: IterationStats | None = None
        """Statistics of requests that ended here, without a message of the core."""

    def add_request(
        self, request: EngineCoreRequest, prompt: str | None, collector: RequestOutputCollector | None = None
    ) -> list[EngineCoreRequest]:
        """Registers the request; returns the n requests to send to the core."""
        external_id = request.external_req_id
        assert external_id is not None, "the InputProcessor keeps the caller's id"
        parent = ParentRequest(request) if request.sampling_params.n > 1 else None
        core_requests = [request] if parent is None else parent.children()
        states = [
            self._new_state(core_request, external_id, prompt, parent, index, collector)
            for index, core_request in enumerate(core_requests)
        ]
        self._states.update((state.request.request_id, state) for state in states)
        self._children[request.request_id] = [each.request_id for each in core_requests]
        self._by_external_id[external_id].append(request.request_id)
        return core_requests

    def _new_state(
        self,
        request: EngineCoreRequest,
        external_id: str,
        prompt: str | None,
        parent: ParentRequest | None,
        index: int,
        collector: RequestOutputCollector | None,
    ) -> RequestState:
        params = request.sampling_params
        return RequestState(
            request=request,
            external_id=external_id,
            prompt=prompt,
            detokenizer=IncrementalDetokenizer(self._tokenizer, params, request.prompt_token_ids),
            logprobs=(
                None if params.logprobs is None else LogprobsProcessor(self._tokenizer, params.logprobs)
            ),
            stats=RequestStats(request.arrival_time, len(request.prompt_token_ids)),
            parent=parent,
            index=index,
            collector=collector,
            stream_interval=self._stream_interval,
        )

    @property
    def num_unfinished(self) -> int:
        """Number of callers' requests, not of core requests."""
        return len(self._children)

    def process_outputs(self, outputs: Iterable[EngineCoreOutput], timestamp: float) -> ProcessedOutputs:
        """Processes one message of the core; outputs of requests aborted meanwhile are dropped."""
        processed = ProcessedOutputs(self.take_aborted() or IterationStats(timestamp))
        processed.iteration_stats.timestamp = timestamp
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            try:
                self._process(state, output, timestamp, processed)
            except Exception as error:  # concerns this request only
                logger.exception("Could not process the output of request %s.", output.request_id)
                self._fail(state, output, error, timestamp, processed)
        return processed

    def _fail(
        self,
        state: RequestState,
        output: EngineCoreOutput,
        error: Exception,
        timestamp: float,
        processed: ProcessedOutputs,
    ) -> None:
        """Fails a request whose output cannot be made; earlier outputs remain valid."""
        if output.finish_reason is None:
            processed.failed_ids.append(output.request_id)
        if output.request_id in self._states:
            self._finish(state, FinishReason.ERROR, timestamp, processed.iteration_stats)
        state.logprobs = None
        result = state.make_output(
            FinishReason.ERROR, processing_failed("Reading the output", error), output.receipt
        )
        if result is not None:
            self._hand_out(state, result, processed.request_outputs)

    def _process(
        self, state: RequestState, output: EngineCoreOutput, timestamp: float, processed: ProcessedOutputs
    ) -> None:
        reason = output.finish_reason
        stop_reason = output.stop_reason
        if output.prompt_logprobs is not None:
            self._tell_prompt(state, output.prompt_logprobs)
        if state.stop_string is None:
            self._note_tokens(state.stats, output, timestamp, processed.iteration_stats)
            state.stop_string = state.detokenizer.update(
                output.new_token_ids,
                finished=reason is not None,
                stop_token=reason is FinishReason.STOP and state.ended_by(output.new_token_ids),
            )
            if state.logprobs is not None and output.new_logprobs is not None:
                state.logprobs.update(output.new_logprobs)
            if state.stop_string is not None and reason is None:
                processed.stopped_ids.append(output.request_id)
        if state.stop_string is not None:
            if reason is None:
                return
            reason = FinishReason.STOP
            stop_reason = state.stop_string
        if reason is not None:
            self._note_final_figures(state.stats, output)
            state.routed_experts = output.routed_experts
            state.pooled = output.pooled
            state.late_by_s = output.late_by_s
            state.kv_transfer_params = self.kv_transfer.tell(output.kv_leased)
            self._finish(state, reason, timestamp, processed.iteration_stats)
        if state.parent is not None and output.late_by_s is not None:
            state.parent.late_by_s = output.late_by_s
            processed.failed_ids += state.parent.unfinished_ids()
        result = state.make_output(reason, stop_reason, output.receipt)
        if result is not None:
            self._hand_out(state, result, processed.request_outputs)

    def _tell_prompt(self, state: RequestState, told: list[TokenLogprobs]) -> None:
        num_top = state.request.sampling_params.prompt_logprobs or 0
        positions = (position_logprobs(self._tokenizer, position, num_top) for position in told)
        state.prompt_logprobs = [None, *positions]
        if state.parent is not None:
            state.parent.prompt_logprobs = state.prompt_logprobs

    @staticmethod
    def _hand_out(state: RequestState, result: RequestOutput, request_outputs: list[RequestOutput]) -> None:
        if state.collector is not None:
            state.collector.put(result)
        else:
            request_outputs.append(result)

    @staticmethod
    def _note_tokens(
        stats: RequestStats, output: EngineCoreOutput, timestamp: float, iteration: IterationStats
    ) -> None:
        """Records the times of the request's tokens, except those after a stop string."""
        num_new = len(output.new_token_ids)
        stats.num_generation_tokens += num_new
        if stats.first_token_time is None:
            stats.num_cached_tokens = output.num_cached_tokens
            stats.queued_s = output.queued_s
        if not num_new and output.pooled is None:
            return
        if stats.first_token_time is None:
            stats.first_token_time = timestamp
            iteration.num_prompt_tokens += stats.num_prompt_tokens
            iteration.time_to_first_tokens_s.append(timestamp - stats.arrival_time)
        elif stats.last_token_time is not None:
            iteration.inter_token_latencies_s.append(timestamp - stats.last_token_time)
        stats.last_token_time = timestamp
        iteration.num_generation_tokens += num_new

    @staticmethod
    def _note_final_figures(stats: RequestStats, output: EngineCoreOutput) -> None:
        """Records the core's final figures of a request, whatever ended it."""
        stats.num_cached_tokens = output.num_cached_tokens
        stats.queued_s = output.queued_s
        stats.num_preemptions = output.num_preemptions

    def _finish(
        self, state: RequestState, reason: FinishReason, timestamp: float, iteration: IterationStats
    ) -> None:
        is_last = self._forget(state)
        if not self._log_stats:
            return
        params = state.request.sampling_params
        iteration.finished_requests.append(
            finished_request_stats(
                state.stats, now=timestamp, finish_reason=str(reason), max_tokens=params.max_tokens
            )
        )
        if is_last:
            iteration.n_params_iter.append(params.n if state.parent is None else state.parent.n)

    def _forget(self, state: RequestState) -> bool:
        """Forgets a core request; returns whether it was the last of its caller's request."""
        request_id = state.request.request_id
        del self._states[request_id]
        own_id = request_id if state.parent is None else state.parent.request_id
        siblings = self._children[own_id]
        siblings.remove(request_id)
        if siblings:
            return False
        del self._children[own_id]
        same_name = self._by_external_id[state.external_id]
        same_name.remove(own_id)
        if not same_name:
            del self._by_external_id[state.external_id]
        return True

    def abort(self, request_id: str) -> list[str]:
        """Aborts a request, by its id from the InputProcessor; returns the ids that the core must abort.

        A reader that still waits gets a last output with finish reason ``abort``.
        """
        aborted = list(self._children.get(request_id, ()))
        now = self._clock.now()
        for core_id in aborted:
            state = self._states[core_id]
            self._aborted = self._aborted or IterationStats(now)
            self._finish(state, FinishReason.ABORT, now, self._aborted)
            result = state.make_output(FinishReason.ABORT)
            if result is not None and state.collector is not None:
                state.collector.put(result)
        return aborted

    def abort_external(self, external_id: str) -> list[str]:
        """Aborts all requests with this id of a caller; returns the ids that the core must abort."""
        request_ids = list(self._by_external_id.get(external_id, ()))
        return [core_id for request_id in request_ids for core_id in self.abort(request_id)]

    def take_aborted(self) -> IterationStats | None:
        """Returns statistics of aborted requests once: here, or with the core's next message."""
        aborted = self._aborted
        self._aborted = None
        return aborted

    def abort_all(self) -> list[str]:
        return [core_id for request_id in list(self._children) for core_id in self.abort(request_id)]

    def fail_all(self, error: EngineDeadError) -> None:
        """Raises the error in all readers and forgets all requests."""
        for state in self._states.values():
            if state.collector is not None:
                state.collector.put(error)
        self._states.clear()
        self._children.clear()
        self._by_external_id.clear()

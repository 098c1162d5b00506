"""The engine for an asyncio server: delivers the core's outputs to the streams that await them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import TypeVar

import msgspec

from engine.clock import MonotonicClock
from engine.config.engine_config import EngineConfig
from engine.core.scheduler_report import SchedulerStatistics
from engine.core_process.client_protocols import AsyncCoreClient, Delivery, EngineState
from engine.errors import EngineDeadError, EngineGenerateError, RequestError, TooLateError, TryAgainError
from engine.frontend.engine_operations import EngineOperations
from engine.frontend.input_processor import GenerationDefaults, InputProcessor
from engine.frontend.kv_transfer import KVTransferDoor
from engine.frontend.output_collector import RequestOutputCollector
from engine.frontend.output_processor import OutputProcessor
from engine.frontend.request_output import RequestOutput
from engine.frontend.server_drain import ServerDrain
from engine.frontend.stats import IterationStats, StatsListener
from engine.frontend.streaming_input import SessionEngine, StreamingInput, StreamingSessions
from engine.records.capacity import Capacity
from engine.records.door import DRAINING
from engine.records.handed_over import END_HANDOVER, HAND_OVER, HandedOver
from engine.records.messages import (
    NO_CONTEXT,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    JobFinished,
    JobStatus,
    PastTurn,
    RequestContext,
    Signal,
    ToolCall,
    ToolGapStarted,
    ToolSignal,
    TurnReceipt,
)
from engine.records.reported_stats import SchedulerStats, TraceState
from engine.records.row_failures import GRAMMAR_LEFT, NOTHING_ALLOWED
from engine.records.sampling_params import SamplingParams
from engine.structured_output.backend import TokenTable
from engine.structured_output.validator import GrammarValidator
from engine.tokenization.no_tokenizer import load_tokenizer
from engine.tokenization.tokenizer import INLINE_CHARS

logger = logging.getLogger(__name__)

TRACE_SWITCH_TIMEOUT_S = 5.0
TRACE_POLL_S = 0.02

T = TypeVar("T")

_FAILED = str(FinishReason.ERROR)

SIGNAL_TIMEOUT_S = 1.0
"""Seconds for which a response waits for its receipt."""
MAX_REMEMBERED_TURNS = 65536
"""Maximum number of finished turns whose internal ids are kept for later signals."""


class AsyncLLM(EngineOperations):
    """Generates for many concurrent callers, with the core in another process. An instance belongs
    to one event loop."""

    def __init__(self, config: EngineConfig, client: AsyncCoreClient, *, log_stats: bool = True) -> None:
        """Waits until the core of ``client`` has loaded the model. Raises the reason if that fails."""
        self.config = config
        self._clock = MonotonicClock()
        self._client = client
        try:  # while the core loads the model
            self.tokenizer = load_tokenizer(config.model)
            self.generation_defaults = GenerationDefaults.load(config.model)
            self.ready: EngineReady = self._client.await_ready()
        except BaseException:
            self._client.close()
            raise
        self._validator = GrammarValidator(lambda: TokenTable.of(self.tokenizer, self.ready.vocab_size))
        self._inputs = InputProcessor(self.tokenizer, self.ready, self.generation_defaults, self._validator)
        self.check_grammar = self._inputs.check_grammar
        clock = self._clock
        interval = config.scheduler.stream_interval
        self._outputs = OutputProcessor(self.tokenizer, clock, log_stats=log_stats, stream_interval=interval)
        self._outputs.kv_transfer = self.kv_transfer = KVTransferDoor(config)
        self._listeners: list[StatsListener] = []
        self._drain = ServerDrain(self)
        self._turns: OrderedDict[str, str] = OrderedDict()
        """Internal ids of finished turns, by the request ids that callers used."""
        self._sessions = StreamingSessions(SessionEngine(self.generate, self._tokenize, self._tell_finished))
        self._attached = False
        self._dead = asyncio.Event()

    # ---- generating ----

    async def generate(
        self,
        prompt: str | list[int] | AsyncGenerator[StreamingInput, None],
        sampling_params: SamplingParams,
        request_id: str,
        context: RequestContext = NO_CONTEXT,
        *,
        on_accepted: Callable[[], None] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yields outputs of one request, in the form of ``sampling_params.output_kind``. For a prompt in
        parts, yields the outputs to one part after the other, the last one of each ``finished``.
        ``on_accepted`` is called once the request has been validated and sent to the core.

        For a slow consumer several steps are merged into one output. Leaving the loop early, or cancelling
        it, aborts the request. Raises RequestError (before the first output), EngineGenerateError if this
        request failed, EngineDeadError if the core died.
        """
        self.start()
        if isinstance(prompt, AsyncGenerator):
            parts = self._sessions.run(prompt, sampling_params, request_id, context, on_accepted)
            async with aclosing(parts) as outputs:
                async for output in outputs:
                    yield output
            return
        request = await self.checked_request(prompt, sampling_params, request_id, context)
        collector = RequestOutputCollector(sampling_params.output_kind)
        core_requests = self._outputs.add_request(
            request, prompt if isinstance(prompt, str) else None, collector
        )
        finished = False
        try:
            self._client.add_requests(core_requests)
            if on_accepted is not None:
                on_accepted()
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                if finished and context.job is not None:
                    self._remember_turn(request_id, core_requests[0].request_id)
                _raise_if_failed(output, sampling_params)
                yield output
        finally:
            if not finished:
                self._send_aborts(self._outputs.abort(request.request_id))

    async def abort(self, request_id: str) -> None:
        """Aborts all requests with this id; each gets a last output with finish reason ``abort``, except a
        session that waits for input."""
        self._sessions.abort(request_id)
        self._send_aborts(self._outputs.abort_external(request_id))

    # ---- jobs ----

    async def tool_gap_started(
        self, request_id: str, calls: Sequence[ToolCall], *, wait: bool = True
    ) -> TurnReceipt | None:
        """Reports which tools run after this finished turn; returns the core's decision, or None if it makes
        none.

        ``request_id`` is the id passed to ``generate``. Returns None at once if the policy uses no signals,
        or without ``wait``.
        """
        if not self.ready.wants_signals:
            return None
        internal_id = self._turns.pop(request_id, None)
        if internal_id is None:
            return None
        signal = ToolGapStarted(internal_id, list(calls))
        if not wait:
            self._client.tell(signal)
            return None
        receipt = await self._signal(signal)
        return None if receipt is None else msgspec.structs.replace(receipt, request_id=request_id)

    @property
    def num_sessions(self) -> int:
        """Number of prompts in parts whose last part has not been answered."""
        return len(self._sessions)

    @property
    def knows_jobs(self) -> bool:
        """Whether the policy tracks jobs; if not, signals have no effect."""
        return self.ready.wants_signals

    async def capacity(self) -> Capacity | None:
        """How many more jobs fit, in all cores; None if the policy does not know."""
        self.start()
        return msgspec.convert(await self._client.call_utility("capacity"), Capacity | None)

    async def jobs(self, limit: int, owner: str | None = None) -> list[JobStatus]:
        """Returns at most ``limit`` jobs, optionally those of one owner, the most recently active first."""
        return await self._utility("jobs", list[JobStatus], limit, owner)

    async def job(self, job_id: str) -> JobStatus | None:
        """The state of one job; None if it is unknown."""
        self.start()
        return msgspec.convert(await self._client.call_utility("job", job_id), JobStatus | None)

    async def past_turns(self, job_id: str) -> list[PastTurn]:
        """The remembered finished turns of the job, oldest first."""
        return await self._utility("past_turns", list[PastTurn], job_id)

    async def tool_signal(self, signal: ToolSignal) -> TurnReceipt | None:
        """Passes a client's report about its tool calls to the core; returns the new decision, None if it
        refers to no known turn."""
        receipt = await self._signal(signal) if self.knows_jobs else None
        if receipt is None or signal.request_id is None:
            return receipt
        return msgspec.structs.replace(receipt, request_id=signal.request_id)

    async def finish_job(self, job_id: str) -> None:
        """Reports that the job has no more turns: its retained KV is released."""
        if self.ready.wants_signals:
            await self._signal(JobFinished(job_id))

    def _tell_finished(self, job_id: str) -> None:
        if self.ready.wants_signals and not self.errored:
            self._client.tell(JobFinished(job_id))

    async def _signal(self, signal: Signal) -> TurnReceipt | None:
        self.start()
        try:
            async with asyncio.timeout(SIGNAL_TIMEOUT_S):
                return await self._client.signal(signal)
        except TimeoutError:
            logger.warning("Engine core did not answer a signal within %s s.", SIGNAL_TIMEOUT_S)
            return None

    def _remember_turn(self, request_id: str, internal_id: str) -> None:
        if self.ready.wants_signals:
            self._turns[request_id] = internal_id
            if len(self._turns) > MAX_REMEMBERED_TURNS:
                self._turns.popitem(last=False)

    # ---- the engine as a whole ----

    @property
    def errored(self) -> bool:
        """Whether the core has died, so that nothing can be generated."""
        return self._client.dead

    @property
    def core_pid(self) -> int:
        """Process id of the engine core."""
        return self._client.pid

    @property
    def dead(self) -> asyncio.Event:
        """Set when the core has died (never by ``shutdown``)."""
        self.start()
        return self._dead

    async def check_health(self) -> None:
        """Raises EngineDeadError if the core has died."""
        if self.errored:
            raise EngineDeadError

    async def reset_prefix_cache(self) -> bool:
        """Drops pins and evicts cached prefixes; False while requests hold blocks."""
        return await self._utility("reset_prefix_cache", bool)

    async def step_age_s(self) -> float:
        """Seconds since the core's current step began; 0 between steps."""
        return await self._utility("step_age_s", float)

    async def statistics(self) -> SchedulerStatistics:
        return await self._utility("statistics", SchedulerStatistics)

    async def engine_states(self) -> list[EngineState]:
        """The states of this server's engine cores, by their numbers."""
        self.start()
        return await self._client.engine_states()

    def drain(self, engine: int, deadline_s: float = 0.0) -> asyncio.Task[HandedOver | None]:
        """Drains a core: new jobs go to others, turns of its own for up to ``deadline_s`` seconds still
        there. The task ends when it has no requests, and has handed over what its pins hold, if a folder
        takes it. RequestError if it cannot be drained."""
        self.start()
        return self._client.drain(engine, deadline_s)

    async def end_drain(self, engine: int) -> None:
        """Lets a core take new requests again. RequestError if it cannot be drained."""
        self.start()
        await self._client.end_drain(engine)

    async def drain_server(self, deadline_s: float = 0.0) -> asyncio.Task[HandedOver | None]:
        """Drains all cores: new jobs are refused, turns of known ones for up to ``deadline_s`` seconds not.
        The task ends when no request is left, and has handed over what pins hold, if a folder takes it."""
        self.start()
        return await self._drain.begin(deadline_s)

    async def end_drain_of_server(self) -> None:
        """Takes new requests again."""
        self.start()
        await self._drain.end()

    async def end_hand_over(self) -> None:
        """Saves no more: the jobs stay."""
        if self.ready.hands_over:
            await self._utility(END_HANDOVER, type(None))

    async def hand_over(self, timeout_s: float) -> HandedOver | None:
        """Saves the KV of paused jobs for other servers, and from now on that of each turn that ends; None if
        no folder takes it."""
        if not self.ready.hands_over:
            return None
        return await self._utility(HAND_OVER, HandedOver, timeout_s)

    async def watch(self, viewer_id: str, *, with_scene: bool) -> bytes:
        """Returns events since this viewer's last call: an ``engine.watch.view.View`` as JSON."""
        return await self._utility("watch", bytes, viewer_id, with_scene)

    async def unwatch(self, viewer_id: str) -> None:
        """Stops recording events for a viewer that has left."""
        await self._utility("unwatch", type(None), viewer_id)

    async def trace_state(self) -> TraceState:
        """Whether the scheduler's trace is being written, and to which file."""
        return await self._utility("trace_state", TraceState)

    async def switch_trace(self, enabled: bool, name: str | None = None) -> TraceState:
        """Starts a trace, in a file of this name if the operator allows it, or stops it. Waits until that is
        done, unless the disk is slow. RequestError if it is not allowed or fails.
        """
        self.start()
        answer = await self._client.call_utility("switch_trace", enabled, name)
        state = msgspec.convert(answer, TraceState | str)
        deadline_s = time.monotonic() + TRACE_SWITCH_TIMEOUT_S
        while isinstance(state, TraceState) and state.state in ("opening", "closing"):
            if time.monotonic() > deadline_s:
                return state
            await asyncio.sleep(TRACE_POLL_S)
            state = await self.trace_state()
        if isinstance(state, str):
            raise RequestError(state, "name")
        if enabled and state.state == "off":
            raise RequestError(f"The trace could not be started: {state.error}.", "name")
        return state

    def _operating(self) -> AbstractAsyncContextManager[None]:
        self.start()
        return self._client.operating()

    async def _utility(self, method: str, result_type: type[T], *args: object) -> T:
        self.start()
        return msgspec.convert(await self._client.call_utility(method, *args), result_type)

    async def checked_request(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str,
        context: RequestContext,
    ) -> EngineCoreRequest:
        """Returns the validated request for the core; RequestError if it is invalid. Other streams do not
        wait for it."""
        arrival_time = self._clock.now()
        prompt_token_ids = await self._tokenize(prompt) if isinstance(prompt, str) else prompt
        if params.structured_outputs is not None:
            # ``process`` does this too, but would block the other streams.
            await asyncio.wrap_future(self._inputs.check_grammar(params.structured_outputs, context.owner))
        return self._inputs.process(
            request_id, prompt_token_ids, params, arrival_time=arrival_time, context=context
        )

    def add_stats_listener(self, listener: StatsListener) -> None:
        self._listeners.append(listener)

    def start(self) -> None:
        """Starts reading the core's outputs on the running loop. Called when necessary; repeatable."""
        if not self._attached:
            self._attached = True
            self._client.attach(asyncio.get_running_loop(), self._take)

    def shutdown(self) -> None:
        """Stops the core, if it was started here, and waits for its end; open streams end with
        EngineDeadError."""
        self._outputs.fail_all(EngineDeadError("The engine was shut down."))
        self._validator.close()
        self._client.close()

    # ---- inside ----

    async def _tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        encode = partial(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return encode() if len(text) <= INLINE_CHARS else await asyncio.to_thread(encode)

    def _send_aborts(self, request_ids: list[str]) -> None:
        if request_ids and not self.errored:
            self._client.abort_requests(request_ids)
        # The next message of the core may take long.
        if (aborted := self._outputs.take_aborted()) is not None:
            self._tell_listeners(None, aborted)

    def _take(self, delivery: Delivery) -> None:
        if isinstance(delivery, EngineDeadError):
            self._end(delivery)
            return
        try:
            self._handle(delivery)
        except EngineDeadError as error:
            self._end(error)
        except Exception as error:
            logger.exception("Output handler failed.")
            self._client.close()
            self._end(EngineDeadError(f"The output handler failed: {error!r}."))

    def _end(self, error: EngineDeadError) -> None:
        self._outputs.fail_all(error)
        self._dead.set()

    def _handle(self, message: EngineCoreOutputs) -> None:
        processed = self._outputs.process_outputs(message.outputs, message.timestamp)
        processed.iteration_stats.engine = message.engine_index
        if processed.stopped_ids:
            self._client.abort_requests(processed.stopped_ids, stopped=True)
        if processed.failed_ids:
            self._client.abort_requests(processed.failed_ids)
        self._tell_listeners(message.scheduler_stats, processed.iteration_stats)

    def _tell_listeners(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        for listener in self._listeners:
            listener(scheduler, iteration)


def _raise_if_failed(output: RequestOutput, params: SamplingParams) -> None:
    for completion in output.outputs:
        if completion.finish_reason == _FAILED:
            reason = str(completion.stop_reason or "The request failed inside the engine.")
            if reason == DRAINING:
                raise TryAgainError(reason)
            if reason in (GRAMMAR_LEFT, NOTHING_ALLOWED):
                raise RequestError(reason, _limiting_field(params))
            if output.late_by_s is not None:
                raise TooLateError(reason, output.late_by_s)
            raise EngineGenerateError(reason)


def _limiting_field(params: SamplingParams) -> str | None:
    """The parameter that most likely excludes all tokens."""
    if params.structured_outputs is not None:
        return params.structured_outputs.field
    named = ("allowed_token_ids", "bad_words", "min_tokens")
    return next((name for name in named if getattr(params, name)), None)

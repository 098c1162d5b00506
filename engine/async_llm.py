"""The engine for an asyncio server: what the core says is handed to the streams that wait for it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

import msgspec

from engine.clock import MonotonicClock
from engine.config import EngineConfig
from engine.core.scheduler_report import SchedulerStatistics
from engine.core_client import AsyncMPClient, Delivery
from engine.errors import EngineDeadError, EngineGenerateError, RequestError
from engine.input_processor import GenerationDefaults, InputProcessor
from engine.launcher import Core
from engine.messages import (
    NO_CONTEXT,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    JobFinished,
    JobStatus,
    PastTurn,
    RequestContext,
    SchedulerStats,
    Signal,
    ToolCall,
    ToolGapStarted,
    ToolSignal,
    TraceState,
    TurnReceipt,
)
from engine.output_processor import OutputProcessor, RequestOutputCollector
from engine.request_output import RequestOutput
from engine.row_failures import GRAMMAR_LEFT, NOTHING_ALLOWED
from engine.sampling_params import SamplingParams
from engine.stats import IterationStats, StatsListener
from engine.structured_output.backend import TokenTable
from engine.structured_output.judge import GrammarJudge
from engine.tokenizer import INLINE_CHARS, Tokenizer

logger = logging.getLogger(__name__)

TRACE_SWITCH_TIMEOUT_S = 5.0
TRACE_POLL_S = 0.02

T = TypeVar("T")

_FAILED = str(FinishReason.ERROR)

SIGNAL_TIMEOUT_S = 1.0
"""A receipt is worth little later than this: the response waits for it."""
MAX_REMEMBERED_TURNS = 65536
"""Finished turns whose internal id is kept for a signal about them."""


class AsyncLLM:
    """Generates for many callers at once, by a core in another process. Belongs to one event loop."""

    def __init__(self, config: EngineConfig, core: Core, *, log_stats: bool = True) -> None:
        """Starts the core, if it is ours, and waits until the model is loaded; raises why it cannot be."""
        self.config = config
        self._clock = MonotonicClock()
        self._client = AsyncMPClient(core)
        try:  # while the core loads the model
            self.tokenizer = Tokenizer.load(config.model)
            self.generation_defaults = GenerationDefaults.load(config.model)
            self.ready: EngineReady = self._client.await_ready()
        except BaseException:
            self._client.close()
            raise
        self._judge = GrammarJudge(lambda: TokenTable.of(self.tokenizer, self.ready.vocab_size))
        self._inputs = InputProcessor(self.tokenizer, self.ready, self.generation_defaults, self._judge)
        self._outputs = OutputProcessor(self.tokenizer, self._clock, log_stats=log_stats)
        self._listeners: list[StatsListener] = []
        self._turns: OrderedDict[str, str] = OrderedDict()
        """Internal ids of finished turns, by the id they were generated under."""
        self._attached = False
        self._dead = asyncio.Event()

    # ---- generating ----

    async def generate(
        self,
        prompt: str | list[int],
        sampling_params: SamplingParams,
        request_id: str,
        context: RequestContext = NO_CONTEXT,
        *,
        on_taken: Callable[[], None] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come, in the form ``sampling_params.output_kind`` asks for.

        ``on_taken`` is called once it has been checked and is on its way to the core.

        A consumer that lags gets several steps merged into one output. Leaving the loop early, or
        cancelling it, aborts the request. Raises RequestError (before the first output),
        EngineGenerateError if this request failed, EngineDeadError if the core died.
        """
        self.start()
        request = await self._checked_request(prompt, sampling_params, request_id, context)
        collector = RequestOutputCollector(sampling_params.output_kind)
        core_requests = self._outputs.add_request(
            request, prompt if isinstance(prompt, str) else None, collector
        )
        finished = False
        try:
            for core_request in core_requests:
                self._client.add_request(core_request)
            if on_taken is not None:
                on_taken()
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
        """End all requests of this id now; their streams get a last output with finish reason ``abort``."""
        self._send_aborts(self._outputs.abort_external(request_id))

    # ---- jobs ----

    async def tool_gap_started(
        self, request_id: str, calls: Sequence[ToolCall], *, wait: bool = True
    ) -> TurnReceipt | None:
        """Tell the core which tools run after this finished turn; its decision, None if it has none.

        ``request_id`` is the id the turn was generated under. None at once where the policy uses no signals,
        and where nobody would ``wait`` for the decision.
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
    def knows_jobs(self) -> bool:
        """Whether the policy follows jobs; if not, none is known and signals are of no use."""
        return self.ready.wants_signals

    async def jobs(self, limit: int, owner: str | None = None) -> list[JobStatus]:
        """At most so many of the jobs that are known, or of those of one owner, those active last first."""
        return await self._utility("jobs", list[JobStatus], limit, owner)

    async def job(self, job_id: str) -> JobStatus | None:
        """What is known of one job; None: of no such job."""
        self.start()
        return msgspec.convert(await self._client.call_utility("job", job_id), JobStatus | None)

    async def past_turns(self, job_id: str) -> list[PastTurn]:
        """The turns of a job that have ended, oldest first, as far as they are remembered."""
        return await self._utility("past_turns", list[PastTurn], job_id)

    async def tool_signal(self, signal: ToolSignal) -> TurnReceipt | None:
        """What the client itself says of its tool calls; the new decision, None if it means no known turn."""
        receipt = await self._signal(signal) if self.knows_jobs else None
        if receipt is None or signal.request_id is None:
            return receipt
        return msgspec.structs.replace(receipt, request_id=signal.request_id)

    async def finish_job(self, job_id: str) -> None:
        """No turn of this job will come any more: what is held for it is let go."""
        if self.ready.wants_signals:
            await self._signal(JobFinished(job_id))

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
        """Whether the core is gone, and with it all that could be generated."""
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
        """EngineDeadError if the core is gone."""
        if self.errored:
            raise EngineDeadError

    async def reset_prefix_cache(self) -> bool:
        """Drop pins and forget cached prefixes; False while requests hold blocks."""
        return await self._utility("reset_prefix_cache", bool)

    async def step_age_s(self) -> float:
        """How long the core has been in the step that it is in; 0 if it is in none."""
        return await self._utility("step_age_s", float)

    async def statistics(self) -> SchedulerStatistics:
        return await self._utility("statistics", SchedulerStatistics)

    async def watch(self, viewer_id: str, *, with_scene: bool) -> bytes:
        """What has happened since this viewer asked last: an ``engine.watch.view.View`` as JSON."""
        return await self._utility("watch", bytes, viewer_id, with_scene)

    async def unwatch(self, viewer_id: str) -> None:
        """The viewer will not ask again: nothing is noted for it any more."""
        await self._utility("unwatch", type(None), viewer_id)

    async def trace_state(self) -> TraceState:
        """Whether the scheduler's trace is being written, and to which file."""
        return await self._utility("trace_state", TraceState)

    async def switch_trace(self, enabled: bool, name: str | None = None) -> TraceState:
        """Begin a trace, in a file of this name if the engine may choose one, or end it; waits until that is
        done, unless the disk is slow. RequestError if it is not to be, or cannot be."""
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
            raise RequestError(f"The trace could not begin: {state.error}.", "name")
        return state

    async def pause(self, *, running_too: bool = False) -> None:
        """Admit nothing more; with ``running_too`` nothing is scheduled at all."""
        await self._utility("pause", type(None), running_too)

    async def resume(self) -> None:
        await self._utility("resume", type(None))

    async def _utility(self, method: str, result_type: type[T], *args: object) -> T:
        self.start()
        return msgspec.convert(await self._client.call_utility(method, *args), result_type)

    def add_stats_listener(self, listener: StatsListener) -> None:
        self._listeners.append(listener)

    def start(self) -> None:
        """Read the core's outputs on the running loop from now on. Whatever needs it does it; repeatable."""
        if not self._attached:
            self._attached = True
            self._client.attach(asyncio.get_running_loop(), self._take)

    def shutdown(self) -> None:
        """Stop the core, if it is ours, and wait until it is gone; open streams end with EngineDeadError."""
        self._outputs.fail_all(EngineDeadError("The engine was shut down."))
        self._judge.close()
        self._client.close()

    # ---- inside ----

    async def _checked_request(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        request_id: str,
        context: RequestContext,
    ) -> EngineCoreRequest:
        """The request as the core will see it; RequestError if it is wrong. Nobody else waits for it."""
        arrival_time = self._clock.now()
        prompt_token_ids = await self._tokenize(prompt) if isinstance(prompt, str) else prompt
        if params.structured_outputs is not None:
            # Also done by ``process``, but there the other streams would wait for it.
            await asyncio.wrap_future(self._inputs.check_grammar(params.structured_outputs))
        return self._inputs.process(
            request_id, prompt_token_ids, params, arrival_time=arrival_time, context=context
        )

    async def _tokenize(self, text: str) -> list[int]:
        if len(text) <= INLINE_CHARS:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    def _send_aborts(self, request_ids: list[str]) -> None:
        if request_ids and not self.errored:
            self._client.abort_requests(request_ids)
        # The core may have nothing more to say for a long time.
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
            if reason in (GRAMMAR_LEFT, NOTHING_ALLOWED):
                raise RequestError(reason, _limiting_field(params))
            raise EngineGenerateError(reason)


def _limiting_field(params: SamplingParams) -> str | None:
    """The parameter that most likely rules out all tokens."""
    if params.structured_outputs is not None:
        return params.structured_outputs.field
    named = ("allowed_token_ids", "bad_words", "min_tokens")
    return next((name for name in named if getattr(params, name)), None)

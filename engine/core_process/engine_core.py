"""The engine core: scheduler, policy and executor joined into steps. No text, no sockets.

Its methods may be called from any thread. One lock guards the scheduler and is *not* held while the model
executes: requests, aborts and signals are taken in during a step (a receipt must not wait for the model), and
the scheduler sees them between ``schedule`` and ``update_from_output``, which it allows. Where the executor
takes more than one plan at a time the next step is planned and submitted before the output of the one under
way is waited for.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from engine.clock import Clock
from engine.config import EngineConfig, SchedulerConfig
from engine.core.offload.offloading_connector import OffloadingConnector
from engine.core.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput, SchedulerOutput, TokenMasks
from engine.core.policy import PolicyContext, PolicyFactory, SchedulingPolicy
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.core.traced_scheduler import TracedScheduler
from engine.core_process.telemetry import open_telemetry, request_listener
from engine.core_process.trace_control import TraceControl
from engine.core_process.utilities import CoreUtilities
from engine.errors import ConfigError, EngineError, RequestError
from engine.executor import Executor, ExecutorFactory, FinishedOutput, ModelInfo, PendingOutput
from engine.messages import (
    AbortRequest,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    SchedulerStats,
    Signal,
    TurnReceipt,
)
from engine.sampling_params import check_vocabulary
from engine.structured_output.backend import CompiledGrammar, TokenTable
from engine.structured_output.bitmask_filler import BitmaskFiller
from engine.structured_output.compiler import GrammarCompiler
from engine.tokenization.prompt_encoder import extreme_tokens
from engine.tokenization.tokenizer import Tokenizer
from engine.watch.core_watch import LiveFeed
from tracing.events import TraceHeader
from tracing.tracer import Tracer

logger = logging.getLogger(__name__)

STALLED_RETRY_S = 0.05
"""Requests wait but none could be scheduled (paused, or held back by the policy), and nothing came free:
look again after this."""
LOAD_POLL_S = 0.001
"""Nothing can run before a load has ended: ask the executor again after this."""
SHORTEST_WAIT_S = 0.001
TELEMETRY_TIMEOUT_S = 2.0
"""When the engine stops, the last spans may take so long to reach their collector."""
PERSIST_TIMEOUT_S = 4.0
"""Who finds another thread at it waits so long for it at most."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A plan that was handed to the executor."""

    plan: SchedulerOutput
    pending: PendingOutput
    at: float

    @property
    def has_tokens(self) -> bool:
        return self.plan.total_num_scheduled_tokens > 0

    def output(self) -> ModelRunnerOutput:
        """Wait for it."""
        output = self.pending.result()
        if self.plan.masks is not None:
            self.plan.masks.result()  # whoever runs the model may have had no use for them
        return output


class EngineCore:
    """Runs requests; see ``EngineCoreProc`` for the process around it."""

    def __init__(
        self,
        config: EngineConfig,
        executor_factory: ExecutorFactory,
        policy_factory: PolicyFactory,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._log_stats = config.log_stats
        # Reentrant: a signal handler may call ``request_stop`` on the thread that holds it.
        self._changed = threading.Condition(threading.RLock())
        self._stopping = False
        self._stalled = False
        self._told = (0, 0)
        """Pins and requests that there were when the front end was told last."""
        """As last reported in the stats: pins also end while nothing runs."""
        self._failed: list[EngineCoreOutput] = []
        """Last outputs of requests that ended outside of a step, to be told with the next."""
        self._closed = False
        self._config = config
        self._tracer = Tracer()
        self._trace = TraceControl(config.trace, self._tracer, self._changed, self._begin_trace)
        self._telemetry = open_telemetry(config.telemetry, clock.now())
        self._persisted = threading.Event()
        self._executor: Executor = executor_factory(config)
        self._max_submitted = self._executor.max_concurrent_batches
        self._submitted: deque[_Submitted] = deque()
        """Plans whose output has not been taken, the oldest first."""
        info = self._executor.info
        _check_token_budget(config.scheduler, info.max_model_len)
        self.policy: SchedulingPolicy = policy_factory(self._policy_context(config, info))
        self._untraced = self._make_scheduler(config, info)
        self._traced = TracedScheduler(self._untraced, self._tracer)
        self._grammars = GrammarCompiler(lambda: TokenTable.of(Tokenizer.load(config.model), info.vocab_size))
        self._masks = BitmaskFiller(self._grammars)
        self.ready = EngineReady(
            num_gpu_blocks=info.num_gpu_blocks,
            max_model_len=info.max_model_len,
            block_size=config.cache.block_size,
            vocab_size=info.vocab_size,
            dtype=info.dtype,
            wants_signals=self.policy.wants_signals,
        )
        watch = LiveFeed(self._untraced, self._tracer, clock, self._changed)
        self.utilities = CoreUtilities(lambda: self.scheduler, clock, self._changed)
        self._by_name: dict[str, Callable[..., Any]] = {
            **self.utilities.by_name(),
            "step_age_s": self.step_age_s,
            "trace_state": self._trace.state,
            "switch_trace": self._trace.switch,
            "watch": watch.watch,
            "unwatch": watch.leave,
        }
        self._trace.start()

    @property
    def scheduler(self) -> Scheduler | TracedScheduler:
        """With its trace around it while somebody wants that: asked anew for each use, under the lock."""
        return self._traced if self._tracer.on else self._untraced

    def _begin_trace(self, from_start: bool) -> TraceHeader:
        return self._traced.begin_trace(time.time(), self._clock.now(), from_start=from_start)

    def _policy_context(self, config: EngineConfig, info: ModelInfo) -> PolicyContext:
        return PolicyContext(
            config.cache.block_size,
            info.num_gpu_blocks - 1,
            self._tracer if self._telemetry is None else Tracer(self._tracer, self._telemetry),
            num_host_blocks=info.num_host_blocks,
        )

    def _make_scheduler(self, config: EngineConfig, info: ModelInfo) -> Scheduler:
        """Over the pool that the executor found room for, with a second tier if there is one."""
        block_size = config.cache.block_size
        connector = (
            OffloadingConnector(info.num_host_blocks, block_size, disk_level=info.disk_level)
            if info.num_host_blocks
            else None
        )
        return Scheduler(
            replace(config.scheduler, async_scheduling=self._max_submitted > 1),
            block_size=block_size,
            num_blocks=info.num_gpu_blocks,
            max_model_len=info.max_model_len,
            policy=self.policy,
            enable_prefix_caching=config.cache.enable_prefix_caching,
            kv_connector=connector,
            on_request_ended=None if self._telemetry is None else request_listener(self._telemetry),
        )

    # ---- what comes in ----

    def add_request(self, message: EngineCoreRequest) -> list[EngineCoreOutput]:
        """Queue a request; returns its error if it cannot be taken, which costs no other request anything."""
        try:
            self._check(message)
            # Hashing a long prompt takes milliseconds: before the lock.
            request = Request.from_core_request(message, self.scheduler.request_block_hasher)
            with self._changed:
                self.scheduler.add_request(request, self._clock.now())
                self._wake()
        except RequestError as error:
            return [failed_output(message.request_id, str(error))]
        except Exception as error:
            logger.exception("Adding request %s failed.", message.request_id)
            return [failed_output(message.request_id, f"The request could not be added: {error!r}.")]
        self._compile_grammar(request)
        return []

    def _compile_grammar(self, request: Request) -> None:
        """Have the grammar made that the request waits for, if it does."""
        params = request.sampling_params
        if params.constrained and params.structured_outputs is not None:
            try:
                compiled = self._grammars.compile(params.structured_outputs)
            except Exception as error:
                compiled = Future()
                compiled.set_exception(error)
            compiled.add_done_callback(lambda done: self._take_grammar(request, done))

    def _take_grammar(self, request: Request, compiled: Future[CompiledGrammar]) -> None:
        """The request may run, or it ends; called on any thread."""
        if self._closed:
            return
        try:
            grammar = compiled.result().start(request.sampling_params)
        except Exception as error:
            if not isinstance(error, RequestError):
                logger.exception("Compiling the grammar of request %s failed.", request.request_id)
            self._fail(request, str(error))
            return
        with self._changed:
            self.scheduler.grammar_compiled(request, grammar, self._clock.now())
            self._wake()

    def _fail(self, request: Request, reason: str) -> None:
        """End a request, which may have ended already, with an error of its own."""
        with self._changed:
            if self.scheduler.requests.get(request.request_id) is not request:
                return
            request.stop_reason = reason
            self._failed += self.scheduler.finish_requests(
                [request.request_id], RequestStatus.FINISHED_ERROR, self._clock.now()
            )
            self._wake()

    def _check(self, message: EngineCoreRequest) -> None:
        """The InputProcessor has checked all this; a client that does not use it must not stop the core."""
        num_tokens = len(message.prompt_token_ids)
        if not 0 < num_tokens < self.ready.max_model_len:
            raise RequestError(
                f"The prompt has {num_tokens} tokens; 1 to {self.ready.max_model_len - 1} fit."
            )
        check_vocabulary("The prompt", extreme_tokens(message.prompt_token_ids), self.ready.vocab_size)
        params = message.sampling_params
        params.verify()
        params.verify_vocabulary(self.ready.vocab_size)
        if params.max_tokens is None:
            raise RequestError("max_tokens is not set.", "max_tokens")
        if message.request_id in self.scheduler.requests:
            raise RequestError(f"Request id {message.request_id!r} is in use.")

    def abort_requests(self, message: AbortRequest) -> list[EngineCoreOutput]:
        """End requests now, each with its last output; those that have ended already are left out."""
        status = RequestStatus.FINISHED_STOPPED if message.stopped else RequestStatus.FINISHED_ABORTED
        with self._changed:
            outputs = self.scheduler.finish_requests(message.request_ids, status, self._clock.now())
            self._wake()
        return outputs

    def signal(self, signal: Signal) -> TurnReceipt | None:
        with self._changed:
            receipt = self.scheduler.signal(signal, self._clock.now())
            self._wake()
        return receipt

    # ---- running ----

    def wait_for_work(self) -> bool:
        """Block until there is something to step for, or to tell; False when the core is to stop."""
        with self._changed:
            while not self._stopping:
                if self._failed or (self._has_work() and not self._stalled):
                    return True
                if self._log_stats and self._to_tell() != self._told:
                    return True
                if not self._changed.wait(self._idle_timeout_s()):
                    self._stalled = False
                self.scheduler.expire(self._clock.now())
            return False

    def _to_tell(self) -> tuple[int, int]:
        """What may change while no step runs: a pin ends, a request is given up."""
        return self.scheduler.kv.num_pins, len(self.scheduler.requests)

    def _has_work(self) -> bool:
        """A step under way is work too, also if nobody waits for its tokens: it holds blocks."""
        return bool(self._submitted) or self._has_plans_to_make()

    @property
    def winds_down(self) -> bool:
        """Whether all that is under way are steps whose tokens nobody waits for."""
        return bool(self._submitted) and not self._has_plans_to_make()

    def _has_plans_to_make(self) -> bool:
        """A load of an aborted request is one too: it holds blocks until the executor reports it."""
        return self.scheduler.has_unfinished_requests() or self.scheduler.num_pending_loads > 0

    def _idle_timeout_s(self) -> float | None:
        due_s = self.scheduler.next_due_s()
        until_due_s = None
        if due_s is not None:
            until_due_s = min(max(SHORTEST_WAIT_S, due_s - self._clock.now()), threading.TIMEOUT_MAX)
        if not self._stalled:
            return until_due_s
        retry_s = LOAD_POLL_S if self.scheduler.num_pending_loads else STALLED_RETRY_S
        return retry_s if until_due_s is None else min(retry_s, until_due_s)

    def step(self) -> EngineCoreOutputs | None:
        """Plan as far ahead as the executor goes, then account for the oldest step; None if there was nothing
        to run and nothing to tell."""
        while self._may_plan_next():
            self._submit_next()
        submitted = self._submitted[0]
        result = submitted.output()
        with self._changed:
            self._submitted.popleft()
            return self._account(submitted.plan, result)

    def _may_plan_next(self) -> bool:
        """Not behind a plan of no tokens: its output is there at once."""
        submitted = self._submitted
        if not submitted:
            return True
        is_full = len(submitted) >= self._max_submitted
        return not is_full and submitted[-1].has_tokens and self._has_plans_to_make()

    def _submit_next(self) -> None:
        with self._changed:
            now = self._clock.now()
            plan = self.scheduler.schedule(now)
            runs_nothing = not plan.total_num_scheduled_tokens and not self._submitted
            self._stalled = runs_nothing and not self.scheduler.replan_at_once and self._has_plans_to_make()
            if self.scheduler.sampled_grammars(plan):
                plan.masks = self._masks.promise()
            if not self._submitted:
                self._fill_masks(plan)
        self._submitted.append(_Submitted(plan, self._submit(plan), now))

    def _fill_masks(self, plan: SchedulerOutput) -> None:
        """All tokens sampled before this plan's are known now."""
        if plan.masks is not None:
            self._masks.fill(plan.masks, self.scheduler.sampled_grammars(plan))

    def _account(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs | None:
        if result.finished_loads or result.failed_loads:
            self._stalled = False
        if plan.masks is not None:
            self._end_failed_grammars(plan.masks.result())
        now = self._clock.now()
        outputs = self._failed + self.scheduler.update_from_output(plan, result, now)
        self._failed = []
        if self._submitted:
            self._fill_masks(self._submitted[0].plan)
        to_tell = self._to_tell()
        if not outputs and not plan.total_num_scheduled_tokens and to_tell == self._told:
            return None
        self._told = to_tell
        stats = self._make_stats() if self._log_stats else None
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=now)

    def _end_failed_grammars(self, masks: TokenMasks) -> None:
        """Before the step's tokens are taken: those of a request that has ended are dropped."""
        for request_id, reason in masks.failed.items():
            request = self.scheduler.constrained.get(request_id)
            if request is not None:
                self._fail(request, reason)

    def _make_stats(self) -> SchedulerStats:
        stats = self.scheduler.make_stats()
        stats.trace_dropped = self._trace.take_dropped()
        if self._telemetry is not None:
            stats.telemetry_dropped = self._telemetry.take_dropped()
        return stats

    def _submit(self, plan: SchedulerOutput) -> PendingOutput:
        if (
            plan.total_num_scheduled_tokens
            or plan.finished_req_ids
            or plan.preempted_req_ids
            or self.scheduler.num_pending_loads
        ):
            return self._executor.submit(plan)
        return FinishedOutput(EMPTY_MODEL_RUNNER_OUTPUT)

    def _wake(self) -> None:
        self._stalled = False
        self._changed.notify_all()

    def now(self) -> float:
        return self._clock.now()

    def step_age_s(self) -> float:
        """How long the step that is under way has taken by now; 0 if there is none."""
        with self._changed:
            return self._clock.now() - self._submitted[0].at if self._submitted else 0.0

    def call_utility(self, method: str, args: list[Any]) -> Any:
        """One of the utilities by name; RequestError for any other."""
        utility = self._by_name.get(method)
        if utility is None:
            raise RequestError(f"The engine core has no utility {method!r}.", "method")
        result = utility(*args)
        with self._changed:
            self._wake()
        return result

    # ---- stopping ----

    def on_failure(self, told: Callable[[EngineError], None]) -> None:
        """See Executor.on_failure."""
        self._executor.on_failure(told)

    def request_stop(self) -> None:
        """Let ``wait_for_work`` return False; callable from a signal handler."""
        self._stopping = True
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Persist what must survive, then free the model. Repeatable."""
        self.persist()
        self._executor.shutdown()

    def persist(self) -> None:
        """Save the policy's state and complete the trace: also possible while a step is still running.

        Returns when that is done, whichever thread does it.
        """
        with self._changed:
            first, self._closed = not self._closed, True
        if not first:
            self._persisted.wait(PERSIST_TIMEOUT_S)
            return
        with self._changed:
            now = self._clock.now()
            self.scheduler.close(now)
            self._grammars.close()
            self._masks.close()
        self._trace.close()
        if self._telemetry is not None:
            self._telemetry.close(now, TELEMETRY_TIMEOUT_S)
        self._persisted.set()


def failed_output(request_id: str, reason: str) -> EngineCoreOutput:
    """The only and last output of a request that could not be run."""
    return EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR, stop_reason=reason)


def _check_token_budget(scheduler: SchedulerConfig, max_model_len: int) -> None:
    """A prompt that may not be cut and fits in no step would wait for ever."""
    if not scheduler.enable_chunked_prefill and scheduler.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"Without chunked prefill max_num_batched_tokens ({scheduler.max_num_batched_tokens}) must be at "
            f"least max_model_len ({max_model_len}): raise the one or lower the other."
        )

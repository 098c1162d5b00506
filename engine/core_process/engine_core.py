"""The engine core: runs the scheduler, the policy and the executor in steps. No text, no sockets.

Its methods are thread-safe. One lock guards the scheduler and is *not* held while the model executes:
requests, aborts and signals are accepted during a step (a receipt must not wait for the model), and reach the
scheduler between ``schedule`` and ``update_from_output``, which it allows. With async scheduling the next
step is planned and submitted before the output of the step in flight is awaited.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.clock import Clock
from engine.config.engine_config import EngineConfig
from engine.config.parallel import cores_sharing_experts
from engine.core.core_outputs import failed_output, note_prompt_logprobs, with_pooled
from engine.core.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput, SchedulerOutput, TokenMasks
from engine.core.policy import PolicyFactory, SchedulingPolicy
from engine.core.request import KnownPrefix, Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.core.token_grammar import TokenGrammar
from engine.core.traced_scheduler import TracedScheduler
from engine.core_process.core_adapters import CoreAdapters
from engine.core_process.core_grammars import CoreGrammars
from engine.core_process.core_part import CoreParts
from engine.core_process.core_parts import (
    check_request,
    check_token_budget,
    engine_ready,
    make_policy,
    make_scheduler,
    open_saved_prefixes,
    refuse_new,
    scheduler_config,
)
from engine.core_process.drafting import make_drafting
from engine.core_process.events.kv_events import closed_on_failure, open_kv_events
from engine.core_process.kept_turns import KeptTurns
from engine.core_process.lease_keeper import lease_place, open_lease_keeper
from engine.core_process.saved_kv.handover import open_handover
from engine.core_process.telemetry import RequestSpans, open_telemetry
from engine.core_process.trace_control import TraceControl
from engine.core_process.useless_requests import UselessRequests
from engine.core_process.utilities import CoreUtilities
from engine.core_process.waves import Waves
from engine.errors import EngineError, RequestError
from engine.executor import Executor, ExecutorFactory, FinishedOutput, PendingOutput
from engine.records.door import DRAINING, Door
from engine.records.messages import (
    AbortRequest,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    Signal,
    TurnReceipt,
)
from engine.records.reported_stats import SchedulerStats
from engine.watch.core_watch import LiveFeed
from tracing.events import TraceHeader
from tracing.tracer import Tracer

logger = logging.getLogger(__name__)

STALLED_RETRY_S = 0.05
"""Time until scheduling is retried if requests wait but none could be scheduled (paused, or delayed by the
policy) and no blocks became free."""
LEASE_POLL_S = 0.2
"""How often an idle executor is polled for leased KV that has been read."""
LOAD_POLL_S = 0.001
"""How often the executor is polled if nothing can run before a load has ended."""
SHORTEST_WAIT_S = 0.001
KV_NOT_FETCHED = "The prompt's KV could not be fetched (kv_load_failure_policy: fail)."
PERSIST_TIMEOUT_S = 4.0
"""If another thread is already persisting, wait at most this long for it."""


@dataclass(frozen=True, slots=True)
class SubmittedPlan:
    """A plan that was handed to the executor."""

    plan: SchedulerOutput
    pending: PendingOutput
    at: float

    def output(self) -> ModelRunnerOutput:
        """Wait for the plan's output."""
        output = self.pending.result()
        if self.plan.masks is not None:
            self.plan.masks.result()  # the executor may not have needed them
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
        self._stopping = self._stalled = self._closed = False
        self._reported = (0, 0)
        """Numbers of pins and of requests, as last reported: both may change while nothing runs."""
        self._failed: list[EngineCoreOutput] = []
        """Final outputs of requests that were ended outside of a step; sent with the next step's outputs."""
        self._tracer = Tracer()
        self._trace = TraceControl(config.trace, self._tracer, self._changed, self._begin_trace)
        telemetry = open_telemetry(config.telemetry, clock.now())
        kv_events = open_kv_events(config.kv_events, config.parallel.data_parallel_rank)
        self._persisted = threading.Event()
        self._submitted: deque[SubmittedPlan] = deque()
        """Plans whose output has not been processed, the oldest first."""
        self._may_have_tokens = True  # whether the next plan may, as the last one did or an output came since
        with closed_on_failure(kv_events):
            self._executor: Executor = executor_factory(config)
            self._max_submitted = self._executor.max_concurrent_batches
            info = self._executor.info
            check_token_budget(scheduler_config(config, info), info.max_model_len)
            tracer = self._tracer if telemetry is None else Tracer(self._tracer, telemetry)
            self.policy: SchedulingPolicy = make_policy(policy_factory, config, info, tracer)
            self._drafting = make_drafting(config, self._executor, self.policy.job_of)
            self.kept_turns = KeptTurns(
                info.num_gpu_blocks * config.cache.block_size, config.cache.block_size
            )
            self._untraced = make_scheduler(
                config, info, self.policy, self._max_submitted > 1, self._request_ended
            )
        self._traced = TracedScheduler(self._untraced, self._tracer)
        if kv_events is not None:
            kv_events.attach(self._untraced, clock)
        self._asks_readers = False
        """Whether to poll the worker for reports of lease readers, though nothing runs."""
        self._grammars = CoreGrammars(
            config.model, info.vocab_size, compiled=self._queue_with, failed=self._fail
        )
        self._waves = Waves(cores_sharing_experts(config))
        self._executor.on_wave(self._join_wave)
        self.ready = engine_ready(config, info, self.policy)
        self.utilities = CoreUtilities(lambda: self.scheduler, clock, self._changed, self._executor)
        operations = self.utilities.operations
        operations.on_loaded = self._loaded
        operations.switch_trace = self._trace.switch
        self._parts = CoreParts(
            (
                self._trace,  # complete before others close sockets, which may take their time
                kv_events,
                CoreAdapters(self._executor, config.lora, self.utilities.adapters_in_use),
                open_lease_keeper(config),
                lease_place(config),
                None if telemetry is None else RequestSpans(telemetry),
                self._drafting,
                open_saved_prefixes(config, info, self._untraced),
                open_handover(config, self._executor, lambda: self.scheduler, clock, self._changed),
                UselessRequests(
                    lambda: self.scheduler, lambda ids: self._end(ids, RequestStatus.FINISHED_ABORTED)
                ),
                self.kept_turns,  # takes the lists of a request that ended: after all that read them
            )
        )
        self._by_name = self._utilities()
        self._trace.start()

    @property
    def scheduler(self) -> Scheduler | TracedScheduler:
        """The scheduler, wrapped by its tracer while tracing is on. Read it for each use, under the lock."""
        return self._traced if self._tracer.on else self._untraced

    def _begin_trace(self, from_start: bool) -> TraceHeader:
        return self._traced.begin_trace(time.time(), self._clock.now(), from_start=from_start)

    def _utilities(self) -> dict[str, Callable[..., Any]]:
        """All utilities by the names under which another process calls them."""
        watch = LiveFeed(self._untraced, self._tracer, self._clock, self._changed)
        own: dict[str, Callable[..., Any]] = {
            "step_age_s": self.step_age_s,
            "watch": watch.watch,
            "unwatch": watch.leave,
        }
        return {**self.utilities.by_name(), **self._parts.utilities(), **own}

    def _request_ended(self, request: Request, now: float) -> None:
        self._parts.request_ended(request, now)

    def _loaded(self, folder: Path | None) -> None:
        """Other weights have been loaded, whose saved KV is in this folder."""
        if folder is not None:
            with self._changed:
                self._parts.loaded(folder, self.scheduler.requests.values())

    # ---- input ----

    @property
    def _door(self) -> Door:
        """Which requests are taken."""
        return self.utilities.operations.taking

    def add_request(
        self, message: EngineCoreRequest, before: KnownPrefix | None = None
    ) -> list[EngineCoreOutput]:
        """Queue a request; returns an error output if it cannot be added. Other requests are not affected.
        ``before``: the turn that it continues."""
        try:
            check_request(message, self.ready)
            if message.request_id in self.scheduler.requests:
                raise RequestError(f"Request id {message.request_id!r} is in use.")
            if self._door is Door.CLOSED:
                raise RequestError(DRAINING)
            self._parts.opening(message)
            # Without the lock: hashing a long prompt takes milliseconds, and so do files.
            request = Request.from_core_request(message, self.scheduler.request_block_hasher, before)
            self._parts.made(request)
            with self._changed:
                self._parts.queueing(request)
                now = self._clock.now()
                self.scheduler.add_request(request, now)
                self._parts.opened(message)
                self._wake()
                refused = refuse_new(request, self.scheduler, self._parts, now, self._door)
        except RequestError as error:
            return [failed_output(message.request_id, str(error))]
        except Exception as error:
            logger.exception("Adding request %s failed.", message.request_id)
            return [failed_output(message.request_id, f"The request could not be added: {error!r}.")]
        if not refused:
            self._grammars.compile(request)
        return refused

    def _queue_with(self, request: Request, grammar: TokenGrammar) -> None:
        """Queue a request whose grammar was compiled; called on any thread."""
        with self._changed:
            self.scheduler.grammar_compiled(request, grammar, self._clock.now())
            self._failed += refuse_new(request, self.scheduler, self._parts, self._clock.now(), self._door)
            self._wake()

    def _fail(self, request: Request, reason: str) -> None:
        """End a request with an error, unless it has already ended."""
        with self._changed:
            if self.scheduler.requests.get(request.request_id) is not request:
                return
            request.stop_reason = reason
            self._end([request.request_id], RequestStatus.FINISHED_ERROR)

    def _end(self, request_ids: Sequence[str], status: RequestStatus) -> None:
        """End requests; their last outputs are sent with the next step's. Called under the lock."""
        self._failed += self.scheduler.finish_requests(request_ids, status, self._clock.now())
        self._wake()

    def abort_requests(self, message: AbortRequest) -> list[EngineCoreOutput]:
        """End requests now; returns the final output of each that has not already ended."""
        status = RequestStatus.FINISHED_STOPPED if message.stopped else RequestStatus.FINISHED_ABORTED
        with self._changed:
            outputs = self.scheduler.finish_requests(message.request_ids, status, self._clock.now())
            self._parts.answered(outputs)
            self._wake()
        return outputs

    def signal(self, signal: Signal) -> TurnReceipt | None:
        with self._changed:
            receipt = self.scheduler.signal(signal, self._clock.now())
            self._wake()
        return receipt

    # ---- running ----

    def wait_for_work(self) -> bool:
        """Block until there is work or something to report; False if the core is to stop."""
        with self._changed:
            while not self._stopping:
                if self._failed or (self._has_work() and not self._stalled):
                    return True
                if self._log_stats and self._reportable() != self._reported:
                    return True
                if not self._changed.wait(self._idle_timeout_s()):
                    self._stalled = False
                    self._asks_readers = bool(self.scheduler.leases)
                self.scheduler.expire(self._clock.now())
                self._parts.publish()
            return False

    def _reportable(self) -> tuple[int, int]:
        """Counts that may change while no step runs: a pin ends, a request is aborted."""
        return self.scheduler.kv.num_pins, len(self.scheduler.requests)

    def report_again(self) -> None:
        """Report the stats again: the client with the last report may have left, or a new one has joined."""
        with self._changed:
            self._reported = (-1, -1)
            self._changed.notify_all()

    def _has_work(self) -> bool:
        """Whether there is work. A step in flight counts even if its requests have ended: it holds blocks."""
        return bool(self._submitted) or self._has_plans_to_make()

    @property
    def is_draining(self) -> bool:
        """Whether only steps whose requests have all ended are in flight, and writes to disk."""
        return (bool(self._submitted) or self._writes_to_disk()) and not self._has_requests()

    def _has_plans_to_make(self) -> bool:
        """Whether to plan steps. A write to disk counts, as its content must be found after a pause."""
        return self._has_requests() or self._writes_to_disk() or self._waves.running

    def _has_requests(self) -> bool:
        """Whether there are requests. The load of an aborted one counts: it holds blocks until reported."""
        scheduler = self.scheduler
        has_requests = scheduler.has_unfinished_requests() or scheduler.num_pending_loads > 0
        return has_requests or scheduler.leases.has_news or self._asks_readers

    def _has_nothing_to_do(self) -> bool:
        """Whether there is nothing to plan nor to report; pins may end meanwhile."""
        with self._changed:
            now = self._clock.now()
            due_s = self.scheduler.next_due_s()
            if due_s is not None and due_s <= now:
                self.scheduler.expire(now)
                self._parts.publish()
            is_reported = not self._failed and self._reportable() == self._reported
            has_plans = self._submitted or self._has_requests() or self._writes_to_disk()
            return is_reported and not has_plans and not self.scheduler.leases

    def _join_wave(self, number: int) -> None:
        """Join a wave of steps that another core has begun; called on any thread."""
        with self._changed:
            self._waves.begun_by_other(number)
            self._wake()

    def _writes_to_disk(self) -> bool:
        return self.scheduler.loads.num_disk_writes > 0

    def _idle_timeout_s(self) -> float | None:
        due_s = self.scheduler.next_due_s()
        until_due_s = None
        if due_s is not None:
            until_due_s = min(max(SHORTEST_WAIT_S, due_s - self._clock.now()), threading.TIMEOUT_MAX)
            if self.scheduler.leases:
                until_due_s = min(until_due_s, LEASE_POLL_S)
        if not self._stalled:
            return until_due_s
        retry_s = LOAD_POLL_S if self.scheduler.num_pending_loads else STALLED_RETRY_S
        return retry_s if until_due_s is None else min(retry_s, until_due_s)

    def step(self) -> EngineCoreOutputs | None:
        """Submit as many plans as the executor accepts, then process the output of the oldest. None if there
        was nothing to run or report."""
        if self._waves.running and self._has_nothing_to_do():
            self._waves.serve(self._executor)
            return None
        while self._may_plan_next():
            self._submit_next()
        submitted = self._submitted[0]
        result = submitted.output()
        with self._changed:
            self._submitted.popleft()
            self._may_have_tokens |= self._max_submitted > 2
            outputs = self._account(submitted.plan, result)
        if self.scheduler.leases.has_news and not self.scheduler.requests and not self._submitted:
            self._submit_next()  # though nothing runs: readers may read the lease as soon as they know of it
        return outputs

    def _may_plan_next(self) -> bool:
        """Whether to submit another plan. Not after one without tokens: its output is available at once."""
        submitted = self._submitted
        if not submitted:
            return True
        if self._drafting is not None and self._drafting.awaits_output:
            return False
        is_full = len(submitted) >= self._max_submitted
        return not is_full and self._may_have_tokens and self._has_plans_to_make()

    def _submit_next(self) -> None:
        with self._changed:
            now = self._clock.now()
            plan = self.scheduler.schedule(now)
            self._asks_readers = False
            self._may_have_tokens = plan.total_num_scheduled_tokens > 0
            plan.in_wave = self._waves.has_part(plan.total_num_scheduled_tokens)
            runs_nothing = not (plan.total_num_scheduled_tokens or plan.in_wave or self._submitted)
            self._stalled = runs_nothing and not self.scheduler.replan_at_once and self._has_plans_to_make()
            self._grammars.reserve(plan, self.scheduler.sampled_grammars(plan))
            if not self._submitted:
                self._fill_masks(plan)
        self._submitted.append(SubmittedPlan(plan, self._submit(plan), now))

    def _fill_masks(self, plan: SchedulerOutput) -> None:
        """Fill the plan's grammar bitmasks; all tokens sampled before this plan must be known."""
        if plan.masks is not None:
            self._grammars.fill(plan, self.scheduler.sampled_grammars(plan))

    def _account(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs | None:
        if result.finished_loads or result.failed_loads:
            self._stalled = False
        if plan.in_wave:
            self._waves.ended(result.waves_ended)
        if plan.masks is not None:
            self._end_failed_grammars(plan.masks.result())
        note_prompt_logprobs(result, self.scheduler.requests)
        now = self._clock.now()
        outputs = with_pooled(self.scheduler.update_from_output(plan, result, now), result)
        if result.failed_loads:
            for request in self.scheduler.loads.take_lost():
                self._fail(request, KV_NOT_FETCHED)
        outputs = self._failed + outputs
        self._failed = []
        self._parts.answered(outputs)
        if self._submitted:
            self._fill_masks(self._submitted[0].plan)
        if self._drafting is not None:
            is_idle = not self._submitted
            self._drafting.after_output(self.scheduler, plan, result, now, is_idle=is_idle)
        self._parts.publish()
        reportable = self._reportable()
        if not outputs and not plan.total_num_scheduled_tokens and reportable == self._reported:
            return None
        self._reported = reportable
        stats = self._make_stats() if self._log_stats else None
        return EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=now)

    def _end_failed_grammars(self, masks: TokenMasks) -> None:
        """End requests whose bitmask could not be filled. Runs before the step's tokens are appended, as the
        tokens of ended requests are dropped."""
        for request_id, reason in masks.failed.items():
            request = self.scheduler.constrained.get(request_id)
            if request is not None:
                self._fail(request, reason)

    def _make_stats(self) -> SchedulerStats:
        stats = self.scheduler.make_stats()
        self._parts.fill_stats(stats)
        return stats

    def _submit(self, plan: SchedulerOutput) -> PendingOutput:
        if plan.concerns_worker or self.scheduler.awaits_worker:
            return self._executor.submit(plan)
        return FinishedOutput(EMPTY_MODEL_RUNNER_OUTPUT)

    def _wake(self) -> None:
        self._stalled = False
        self._parts.publish()
        self._changed.notify_all()

    def now(self) -> float:
        return self._clock.now()

    def step_age_s(self) -> float:
        """How long the oldest step in flight has been running; 0 if there is none."""
        with self._changed:
            return self._clock.now() - self._submitted[0].at if self._submitted else 0.0

    def call_utility(self, method: str, args: list[Any]) -> Any:
        """Call a utility by name; RequestError if there is none of that name."""
        utility = self._by_name.get(method)
        if utility is None:
            raise RequestError(f"The engine core has no utility {method!r}.", "method")
        result = utility(*args)
        with self._changed:
            self._wake()
        return result

    # ---- stopping ----

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """See ``Executor.on_failure``."""
        self._executor.on_failure(callback)

    def request_stop(self) -> None:
        """Make ``wait_for_work`` return False; may be called in a signal handler."""
        self._stopping = True
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Persist the policy's state and the trace, then free the model. May be called again."""
        self.persist()
        self._parts.stop()
        self._executor.shutdown()

    def persist(self) -> None:
        """Save the policy's state and complete the trace. May be called while a step is running.

        If another thread is already doing it, waits for that one.
        """
        with self._changed:
            first = not self._closed
            self._closed = True
        if not first:
            self._persisted.wait(PERSIST_TIMEOUT_S)
            return
        self._parts.stopping()
        with self._changed:
            now = self._clock.now()
            self.scheduler.close(now)
            self._grammars.close()
            self._parts.publish()
        self._parts.persist(now)
        self._persisted.set()

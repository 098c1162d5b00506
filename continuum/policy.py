"""The agent policy: keeps a job's KV across its tool calls, and orders the queue by job.

It assembles the parts and answers the scheduler; each answer comes from one part. The scheduler manages the
blocks. Every decision is written into the trace with all its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from msgspec import structs

from continuum.config import ContinuumConfig
from continuum.jobs.branches import Branches
from continuum.jobs.job import BranchTip, Turn
from continuum.jobs.moved_jobs import moved_turn, take_up
from continuum.jobs.prewarming import Prewarming
from continuum.jobs.registry import JobRegistry
from continuum.jobs.stale_prefixes import StalePrefixes
from continuum.jobs.turns import Turns
from continuum.learning.learners import Learners
from continuum.learning.tool_stats import ToolStats
from continuum.queueing.admission import WorkingSet
from continuum.queueing.aging import Aging
from continuum.queueing.job_queue import JobQueue
from continuum.queueing.order import JobRanks
from continuum.reports.job_metrics import JobMetrics
from continuum.reports.job_reports import JobReports
from continuum.reports.policy_trace import PolicyTrace
from continuum.reports.receipts import make_receipt
from continuum.reports.turn_history import TurnHistory
from continuum.retention.pins import PinTable
from continuum.retention.retention import Retention
from continuum.retention.revocation import RevocationRule
from continuum.retention.ttl import TtlDecision, TtlInputs, make_rule
from continuum.tool_signals import ToolSignals
from engine.config.engine_files import path_of_engine
from engine.core.policy import (
    Pin,
    PinEnd,
    PolicyContext,
    PolicyDescription,
    SchedulingPolicy,
    StalePrefix,
    WaitingKey,
)
from engine.core.request import Request, RequestStatus
from engine.records.capacity import Capacity
from engine.records.lessons import Lesson, ModelLearned
from engine.records.messages import (
    JobFinished,
    JobStatus,
    PastTurn,
    Signal,
    ToolGapStarted,
    ToolSignal,
    TurnReceipt,
)
from engine.records.reported_stats import JobStats
from estimator.learned.models import decode_model
from tracing.events import MovedTurn

LAST_STEP = "last step of the job"


@dataclass(frozen=True, slots=True)
class ContinuumStatistics:
    """Numbers of the objects that the policy remembers at one moment."""

    num_jobs: int
    num_open_turns: int
    num_pins: int
    num_pinned_blocks: int
    num_recognizable: int
    """Number of branch tips by which a turn without a job id would be recognized."""


class ContinuumPolicy(SchedulingPolicy):
    """Combines jobs, pins and the queue order."""

    name = "continuum"
    wants_signals = True
    orders_by_priority = True
    lets_pass = True
    trainer: str | None = "estimator.learned.trainer"
    tool_stats: type[ToolStats] = ToolStats
    ranks: type[JobRanks] = JobRanks

    def __init__(self, context: PolicyContext, config: ContinuumConfig | None = None) -> None:
        config = self._config = config or ContinuumConfig()
        if not config.learn_order:
            self.trainer = None
        block_size = self._block_size = context.block_size
        state_file = path_of_engine(config.estimator_state, context.engine_index)
        self.tools = self.tool_stats(config, state_file)
        learners = self._learners = Learners(self.tools, context, config)
        self._rule = make_rule(config)
        self._trace = PolicyTrace(context.tracer)
        self._jobs = JobRegistry(config.max_jobs, config.job_idle_s, block_size)
        self._pins = PinTable(int(context.num_countable_blocks * config.pin_budget), config.pin_tenant_share)
        # Queue order.
        self._turns = Turns(
            self._jobs, block_size, infer_jobs=config.infer_jobs, on_new_turn=learners.work.turn_began
        )
        self._prewarming = Prewarming(self._jobs, context)
        self._extended: dict[str, float] = {}
        """Until when the pin was held that a request which ends now has replaced, by its id."""
        aging = Aging()
        working_set = WorkingSet(learners, context, config)
        ranks = self.ranks(
            config,
            learners,
            self.work_s,
            work_weight=config.work_weight,
            has_host_tier=context.has_host_tier,
        )
        self._queue = JobQueue(
            config,
            self._turns,
            ranks,
            working_set,
            aging,
            self._trace.turn_parked,
            patience_s=config.patience_s if context.has_host_tier else math.inf,
        )
        # Retention of KV, and revocable pins.
        self._retention = Retention(context, config, self._pins, self.choose_ttl, learners, self._trace)
        self._stale_prefixes = StalePrefixes(
            self._jobs, context.num_blocks, block_size, of_continued=config.release_superseded
        )
        self._revocation_rule = RevocationRule(
            self._pins,
            learners,
            block_size=block_size,
            has_windows=context.has_windows,
            aging=aging,
            search_backoff_s=config.search_backoff_s,
        )
        # Reports. Each event of a branch reaches the listeners in this order.
        tally = JobMetrics()
        self._log = TurnHistory()
        self._branches = Branches(
            block_size,
            (
                *(self._jobs, self._stale_prefixes, *learners.before_admission, working_set),
                *(*learners.after_admission, tally, self._retention, self._trace),
            ),
        )
        self._signals = ToolSignals(
            self._jobs, self._branches, self.tools, learners.gaps, self._retention, self._log
        )
        self._reports = JobReports(self._jobs, working_set, learners.gaps, tally, self._log, block_size)
        self._receipts: dict[str, TurnReceipt] = {}
        """Receipts of turns that ended in the current call, until the scheduler takes them."""

    # ---- for subclasses with more inputs ----

    def choose_ttl(self, tip: BranchTip, inputs: TtlInputs) -> TtlDecision:
        """The rule's decision; a subclass may use inputs that a rule does not get."""
        return self._rule.choose_ttl(inputs)

    def work_s(self, turn: Turn) -> float:
        """Seconds of service that the job is predicted to need beyond what jobs usually do."""
        return self._learners.work.excess_s(turn)

    def expect_unnamed(self, job_ids: frozenset[str]) -> None:
        """Declares ids that stand for jobs without an id from the client: each begins as a single-turn
        request.

        Used by simulations of recorded workloads, in which every turn has the id of its job.
        """
        self._jobs.unnamed = job_ids

    # ---- a turn comes, is admitted and ends ----

    def on_arrival(self, request: Request, now: float) -> None:
        for job in self._jobs.forget_idle(now):
            self._branches.forget_job(job, now)
        if request.job is not None and request.job.moved is not None:
            take_up(self._jobs, self._branches, request, self._block_size, now)
        if self._prewarming.takes(request, now):
            self._queue.arrived(request, None)
            return
        turn = self._turns.open(request, now)
        if turn is not None:
            if turn.tip is not None:
                self._branches.continue_(turn.tip, turn, now)
            elif self._config.release_superseded:
                self._branches.supersede_by(turn, now)
        self._queue.arrived(request, turn)
        if turn is not None:
            self._trace.turn_arrived(turn, now)

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        turn = self._turns.get(request)
        self._revocation_rule.forget(request)
        self._queue.admitted(request, turn, now)
        if turn is None or turn.num_cached_tokens is not None:
            return ()
        turn.admitted(now)
        self._learners.admitted(turn, now)
        self._trace.turn_admitted(turn, now)
        return () if turn.pin is None else (turn.pin,)

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        turn = self._close_turn(request, now)
        if turn is None:
            return self._end_prewarming(request, now)
        self._learners.ended(turn, now)
        self._trace.turn_ended(turn, now)
        receipt = make_receipt(turn)
        pin = None
        if turn.job.is_finished or (request.job is not None and request.job.is_last_step):
            receipt = structs.replace(receipt, reason=LAST_STEP)
            self._branches.finish_job(turn.job, now)
        else:
            tip = self._branches.open(turn, receipt, now)
            pin = self._retention.begin(tip, request.block_hashes[: len(tip.chain)], now)
            receipt = tip.receipt or receipt
        self._log.ended(turn, receipt, now)
        self._receipts[request.request_id] = receipt
        return pin

    def _end_prewarming(self, request: Request, now: float) -> Pin | None:
        """Holds what the request has computed for its job's next turn, where the last turn's KV is held."""
        tip = self._prewarming.tip_of(request)
        self._prewarming.gone(request)
        deadline_s = self._extended.pop(request.request_id, None)
        if tip is None:
            return None
        self._branches.prewarmed(tip, request, now)
        if deadline_s is None or tip.ahead is None:
            return None
        return self._retention.extend(tip, request.block_hashes[: len(tip.ahead)], deadline_s, now)

    def replaced_at_end(self, request: Request, now: float) -> Iterable[Pin]:
        tip = self._prewarming.tip_of(request)
        num_blocks = request.num_computed_tokens // self._block_size
        if tip is None or tip.pin is None or not self._retention.may_extend(tip, num_blocks):
            return ()
        self._extended[request.request_id] = tip.pin.deadline_s
        return (tip.pin,)

    def on_request_gone(self, request: Request, now: float) -> None:
        self._prewarming.gone(request)
        self._revocation_rule.forget(request)
        turn = self._close_turn(request, now)
        if turn is None:
            return
        self._trace.turn_aborted(turn, now)
        if request.status is RequestStatus.FINISHED_ABORTED:
            again = self._turns.cut_off(turn, now)
            if again is not None:
                self._queue.moved_up(again)
        if turn.tip is not None:
            self._branches.restore(turn.tip, now)
        job = turn.job
        if request.status is RequestStatus.FINISHED_ERROR and turn.num_cached_tokens is None:
            job.num_turns -= 1  # it was refused: the job may come again as a new one
        if job.is_finished:
            self._branches.finish_job(job, now)
        elif not job.turns and not job.tips and (job.is_inferred or not job.num_turns):
            self._branches.forget_job(job, now)

    def _close_turn(self, request: Request, now: float) -> Turn | None:
        self._queue.gone(request)
        turn = self._turns.close(request, now)
        if turn is not None:
            self._retention.give_back(turn)
        return turn

    def take_receipt(self, request: Request) -> TurnReceipt | None:
        return self._receipts.pop(request.request_id, None)

    def on_signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        match signal:
            case ToolGapStarted():
                return self._signals.tools_started(signal, now)
            case ToolSignal():
                return self._signals.client_hinted(signal, now)
            case JobFinished():
                job = self._jobs.get(signal.job_id)
                if job is not None:
                    self._branches.finish_job(job, now)
                return None
            case ModelLearned():
                self._learners.take_model(decode_model(signal.model))
                return None

    def take_lesson(self) -> Lesson | None:
        return self._learners.take_lesson()

    # ---- queue order ----

    def late_by_s(self, request: Request, now: float) -> float | None:
        return self._queue.late_by_s(request, now)

    def goes_on(self, request: Request) -> bool:
        if self._prewarming.has(request):
            return True
        turn = self._turns.get(request)
        return turn is not None and (turn.number > 1 or turn.tip is not None or turn.job.parent is not None)

    def made_useless(self, request: Request) -> Iterable[str]:
        turn = self._turns.get(request)
        return () if turn is None or turn.tip is None else self._prewarming.ahead_of(turn.tip)

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return self._queue.waiting_key(request, now)

    def changed_keys(self, now: float) -> Iterable[Request]:
        return self._queue.changed_keys(now)

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        if self._prewarming.has(request):
            return self._prewarming.fits(request, num_free_blocks)
        return self._queue.may_admit(request, now)

    def is_overdue(self, request: Request) -> bool:
        return self._queue.is_overdue(request)

    def may_pass(self, request: Request, now: float) -> bool:
        return self._queue.may_pass(request)

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        return self._queue.victim(running)

    # ---- pins ----

    def revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        if self._prewarming.has(requester):
            return iter(())
        return self._revocation_rule.revocable_for(requester, self._turns.get(requester), now, last_resort)

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        for pin, cause in self._pins.due(now):
            is_due = cause is PinEnd.EXPIRED
            if not (is_due and self._retention.holds_on(pin, self._turns.longest_wait_s, now)):
                yield pin, cause

    def next_due_s(self) -> float | None:
        return 0.0 if self._stale_prefixes else self._pins.next_due_s()

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        tip = self._pins.ended(pin, cause)
        self._trace.ended(pin, tip, cause, by, now)
        if cause in (PinEnd.REVOKED, PinEnd.SUPERSEDED):
            self._queue.lost_pin(turn for turn in tip.job.turns.values() if turn.tip is tip)

    def on_pin_shrunk(
        self, pin: Pin, num_blocks_lost: int, cause: PinEnd, now: float, by: str | None = None
    ) -> None:
        self._pins.shrunk(pin, num_blocks_lost)
        self._trace.shrunk(pin, num_blocks_lost, cause, by, now)

    def moved_turn(self, pin: Pin, now: float) -> MovedTurn | None:
        return moved_turn(self._pins.tip_of(pin), self._block_size, now)

    def take_superseded(self) -> Iterator[StalePrefix]:
        return self._stale_prefixes.take()

    def pins(self) -> Iterable[Pin]:
        return self._pins

    # ---- reports ----

    def job_of(self, request: Request) -> str | None:
        turn = self._turns.get(request)
        return None if turn is None else turn.job.job_id

    def take_job_stats(self) -> JobStats:
        return self._reports.take_job_stats()

    def capacity(self) -> Capacity:
        return self._reports.capacity()

    def jobs(self, limit: int, now: float, owner: str | None = None) -> Sequence[JobStatus]:
        return self._reports.jobs(limit, now, owner)

    def job(self, job_id: str, now: float) -> JobStatus | None:
        return self._reports.job(job_id, now)

    def past_turns(self, job_id: str, now: float) -> Sequence[PastTurn]:
        return self._reports.past_turns(job_id, now)

    def statistics(self) -> ContinuumStatistics:
        return ContinuumStatistics(
            len(self._jobs),
            len(self._turns),
            len(self._pins),
            self._pins.num_blocks,
            self._jobs.num_recognizable,
        )

    def describe(self) -> PolicyDescription:
        options = asdict(self._config)
        del options["estimator_state"]  # report what was in the file, not where it is
        return PolicyDescription(self.name, options, self.tools.state())

    def close(self) -> None:
        self.tools.save()


@dataclass(frozen=True, slots=True)
class ContinuumPolicyFactory:
    """Makes the policy inside the core process."""

    config: ContinuumConfig = field(default_factory=ContinuumConfig)

    def __call__(self, context: PolicyContext) -> SchedulingPolicy:
        return ContinuumPolicy(context, self.config)

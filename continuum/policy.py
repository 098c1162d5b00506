"""The agent policy: keeps a job's KV across its tool calls, and orders the queue by job.

It decides and remembers; blocks are the scheduler's. What is decided, with all inputs, goes into the trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass

from continuum.admission import WorkingSet
from continuum.break_rule import BreakRule
from continuum.config import PUBLISHED_RULES, ContinuumConfig
from continuum.continuation import (
    Continuation,
    continuation_of,
    continuation_of_one,
    left_behind_by,
    prompt_tail,
)
from continuum.cut_turns import CutTurn, CutTurns
from continuum.dead_ends import DeadEnds
from continuum.forecast import WorkForecast
from continuum.gap_lessons import GapLessons
from continuum.holding import Holding
from continuum.job_registry import JobRegistry
from continuum.job_status import frontier_status, job_status
from continuum.job_tally import FINISHED, FORGOTTEN, JobTally
from continuum.jobs import MAX_FRONTIERS, BlockChain, Frontier, Job, Turn
from continuum.kv_cost import KvCost
from continuum.order import RankingAnew, age_weight, job_rank, waiting_key
from continuum.pins import PinTable
from continuum.policy_trace import PolicyTrace
from continuum.program_stats import QueueDelay, RecomputedShare
from continuum.receipts import make_receipt
from continuum.told import Told
from continuum.tool_gaps import PublishedGaps, tool_name
from continuum.tool_memory import ToolMemory
from continuum.ttl import TtlDecision, TtlInputs, make_rule
from continuum.turn_log import TurnLog
from continuum.wait_bound import WaitBound
from engine.core.block_hash import BlockHash
from engine.messages import (
    JobFinished,
    JobStats,
    JobStatus,
    PastTurn,
    Signal,
    ToolCall,
    ToolGapStarted,
    ToolSignal,
    ToolState,
    TurnReceipt,
)
from engine.policy import DeadEnd, Pin, PinEnd, PolicyContext, PolicyDescription, SchedulingPolicy, WaitingKey
from engine.request import Request, RequestStatus

ONE_QUESTION = TtlDecision(0.0, "a single question and its answer")
CANCELLED = TtlDecision(0.0, "the client cancelled the call")
LEFT_BEHIND = TtlDecision(0.0, "the job went on without it")


@dataclass(frozen=True, slots=True)
class ContinuumStatistics:
    """What the policy remembers at one moment."""

    num_jobs: int
    num_open_turns: int
    num_pins: int
    num_pinned_blocks: int
    num_recognisable: int
    """Frontiers by which a turn that nobody named would be recognised."""


def kind_of(request: Request, num_blocks: int) -> BlockHash | None:
    """What names the agent: the hash of its prompt's first so many blocks; None if it is shorter."""
    return request.block_hashes[num_blocks - 1] if 0 < num_blocks <= len(request.block_hashes) else None


def _kind_name(job: Job) -> tuple[str | None, BlockHash] | None:
    """As its tenant's jobs are told apart: equal prompts of two tenants are two kinds."""
    return None if job.kind is None else (job.tenant, job.kind)


class ContinuumPolicy(SchedulingPolicy):
    """Jobs, pins and order."""

    name = "continuum"
    wants_signals = True
    lets_pass = True
    tool_memory: type[ToolMemory] = ToolMemory

    def __init__(self, context: PolicyContext, config: ContinuumConfig) -> None:
        self._config = config
        self._block_size = context.block_size
        self._jobs = JobRegistry(config.max_jobs, config.job_idle_s, context.block_size)
        self._pins = PinTable(int(context.num_blocks * config.pin_budget), config.pin_tenant_share)
        self._dead_ends = DeadEnds(self._jobs, context.num_blocks)
        self._cut_turns = CutTurns(context.block_size)
        self._turns: dict[str, Turn] = {}
        self._frontiers: dict[str, Frontier] = {}
        """Of turns that ended and may still get a signal, by request id."""
        self._receipts: dict[str, TurnReceipt] = {}
        """Of turns that ended in this very call, until the scheduler takes them."""
        self._rule = make_rule(config)
        self.tools = self.tool_memory(config, config.estimator_state)
        published = PublishedGaps() if config.ttl_rule in PUBLISHED_RULES else None
        self._gaps = GapLessons(self.tools, published, context.block_size)
        self._has_host_tier = context.has_host_tier
        self._forecast = WorkForecast()
        self._kv_cost = KvCost(config, has_host_tier=context.has_host_tier)
        self._wait_bound = WaitBound()
        self._break_rule = BreakRule(
            self._pins,
            self.tools,
            self._kv_cost,
            block_size=context.block_size,
            wait_bound=self._wait_bound,
            look_again_s=config.look_again_s,
        )
        self._working_set = WorkingSet(
            self.tools, context.num_blocks, context.num_host_blocks, context.block_size, config
        )
        self._queue_delay = QueueDelay()
        self._recomputed_share = RecomputedShare(config.recomputed_smoothing)
        self._tally = JobTally()
        self._trace = PolicyTrace(context.tracer)
        self._holding = Holding(
            context,
            config,
            self._pins,
            self.choose_ttl,
            tools=self.tools,
            kv_cost=self._kv_cost,
            queue_delay=self._queue_delay,
            forecast=self._forecast,
            published=published,
            trace=self._trace,
        )
        self._log = TurnLog()
        self._changed: list[Request] = []
        self._ranking = RankingAnew()

    # ---- a turn arrives and is admitted ----

    def on_arrival(self, request: Request, now: float) -> None:
        for job in self._jobs.forget_idle(now):
            self._abandon(job, now)
        if request.job is None or (request.job.job_id is None and not self._config.infer_jobs):
            self._wait_bound.arrived(request, self._config.max_wait_s)
            return
        job, recognised = self._jobs.open(request)
        if recognised is not None:
            continuation = continuation_of_one(recognised, request, self._block_size)
        else:
            continuation = continuation_of(job.frontiers, request, self._block_size)
        turn = self._open_turn(job, request, continuation, self._cut_turns.take(request, now))
        self._wait_bound.arrived(request, self._max_wait_s(turn), turn.waits_since_s)
        if turn.frontier is not None:
            self._come_back(turn, turn.frontier, now)
        if self._config.release_superseded:
            self._supersede(turn, continuation)
        if turn.frontier is not None:
            self._dead_ends.forget(turn.frontier)
        self._rank(turn)
        self._trace.turn_arrived(turn, now)

    def _max_wait_s(self, turn: Turn) -> float:
        config = self._config
        return min(config.max_wait_s, config.max_return_wait_s) if turn.number > 1 else config.max_wait_s

    def _open_turn(self, job: Job, request: Request, continuation: Continuation, cut: CutTurn | None) -> Turn:
        """``cut``: the turn that it repeats, and is, if that was this job's; not one more."""
        job.is_finished = False  # whatever was said
        job.priority = request.priority
        frontier = continuation.frontier
        if cut is not None and cut.job is job:
            number = cut.number
        else:
            number = job.num_turns = job.num_turns + 1
            if job.num_turns > 1:
                self._jobs.establish(job)
            self._count_turn(job, request)
        turn = Turn(
            job,
            request,
            number,
            frontier,
            continuation.num_shared_blocks * self._block_size,
            diverged_at_token=continuation.diverged_at_token,
            num_diverged_tokens=continuation.num_diverged_tokens,
            num_task_tokens=request.num_prompt_tokens if frontier is None else frontier.num_task_tokens,
        )
        if cut is not None:
            self._keep_place(turn, cut)
        job.turns[request.request_id] = self._turns[request.request_id] = turn
        self._jobs.begin_turn(turn, request.num_prompt_tokens // self._block_size)
        return turn

    def _keep_place(self, turn: Turn, cut: CutTurn) -> None:
        """It waits for as long as the one that it repeats had, and on."""
        turn.repeats, turn.kept_since_s, turn.keeps_warm = cut.request_id, cut.waits_since_s, cut.was_warm
        turn.job.first_arrival_s = min(turn.job.first_arrival_s, turn.waits_since_s)

    def _count_turn(self, job: Job, request: Request) -> None:
        """A question that is only asked once tells nothing of jobs: it counts when a second turn comes."""
        if job.kind is None:
            job.kind = kind_of(request, self._config.kind_tokens // self._block_size)
        if not job.is_established:
            return
        num_turns = 1
        if job.course is None:
            job.course = self._forecast.course(_kind_name(job), request.num_prompt_tokens)
            num_turns = job.num_turns
        for _ in range(num_turns):
            job.course.begin_turn()

    def _come_back(self, turn: Turn, frontier: Frontier, now: float) -> None:
        """The turn takes the place of this frontier and, when it is admitted, of its pin."""
        self._jobs.remove_frontier(frontier)
        self._working_set.continued(frontier, turn.request)
        self._frontiers.pop(frontier.request_id, None)
        if frontier.is_superseded:
            frontier.is_superseded, turn.job.has_come_back = False, True
        turn.gap_s = max(0.0, turn.request.arrival_time - frontier.ended_s)
        if turn.repeats is None:
            self._tally.gap_closed(frontier, turn.gap_s)
        self._gaps.returned(turn, frontier, turn.gap_s, now)
        if frontier.pin is not None:
            self._pins.claim(frontier.pin)

    def _supersede(self, turn: Turn, continuation: Continuation) -> None:
        """Let go of what the turn's prompt shows its job to go on without."""
        if continuation.frontier is None:
            self._leave_behind(turn)
        elif continuation.diverged_at_token is not None:
            self._let_go_behind(continuation.frontier, continuation.num_shared_blocks, turn)

    def _leave_behind(self, turn: Turn) -> None:
        """It takes nobody's place: there may be a frontier that nobody will come back to now. A job that did
        come back to one keeps several conversations, and is believed about none again."""
        job = turn.job
        left = None if job.has_come_back else left_behind_by(job.frontiers, turn.request, self._block_size)
        if left is None:
            return
        frontier = left.frontier
        if left.same_task:
            turn.num_task_tokens = frontier.num_task_tokens
        self._jobs.supersede(frontier)
        self._working_set.forget(frontier)
        self._let_go_behind(frontier, left.num_shared_blocks, turn)
        frontier.receipt = copy(frontier.receipt)  # the first one has gone to the client
        self._holding.tell(frontier, LEFT_BEHIND)

    def _let_go_behind(self, frontier: Frontier, num_shared_blocks: int, turn: Turn) -> None:
        num_blocks = self._dead_ends.supersede(frontier, num_shared_blocks, turn)
        turn.supersedes, turn.num_superseded_tokens = frontier.request_id, num_blocks * self._block_size

    def _age_weight(self) -> float:
        """How much of its job's age counts beside a turn's own arrival; all of it where lost KV is computed
        again."""
        if not self._has_host_tier:
            return 1.0
        return age_weight(self._forecast.lengths, self._recomputed_share.value, self._config)

    def _rank(self, turn: Turn) -> None:
        turn.job.rank = job_rank(turn, self._age_weight(), self._config.work_weight * self.work_s(turn))

    def work_s(self, turn: Turn) -> float:
        """Seconds of service that the job is forecast to need beyond what jobs usually do; 0 if nothing is
        known."""
        course = turn.job.course
        return course.excess_s if course is not None else self._forecast.excess_s(_kind_name(turn.job))

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        turn = self._turns.get(request.request_id)
        is_overdue = self._wait_bound.queued(request, now)
        is_parked = not is_overdue and turn is not None and self._working_set.parks(turn)
        return waiting_key(request, turn, is_overdue=is_overdue, is_parked=is_parked)

    def changed_keys(self, now: float) -> Iterable[Request]:
        self._changed.extend(self._wait_bound.newly_overdue(now))
        if self._config.work_weight:
            for turn in self._ranking.take(self._forecast.num_lessons, self._turns):
                self._rank(turn)
                self._changed.append(turn.request)
        if not self._changed:
            return ()
        changed, self._changed = self._changed, []
        return changed

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        turn = self._turns.get(request.request_id)
        if turn is None or self._wait_bound.is_overdue(request) or self._working_set.admits(turn, now):
            return True
        if self._working_set.park(turn):
            self._changed.append(request)
            self._trace.turn_parked(turn, self._working_set, now)
        return False

    def is_overdue(self, request: Request) -> bool:
        return self._wait_bound.is_overdue(request)

    def may_pass(self, request: Request, now: float) -> bool:
        # A warm turn holds memory that only running it can free: it must not wait behind one that has none,
        # unless that has waited for too long, and may take what the warm one holds.
        turn = self._turns.get(request.request_id)
        return turn is not None and turn.warm and not self._wait_bound.is_exceeded

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        self._break_rule.forget(request)
        self._wait_bound.admitted(request)
        turn = self._turns.get(request.request_id)
        self._working_set.came(request, None if turn is None else turn.job)
        if turn is None or turn.num_cached_tokens is not None:
            return ()
        turn.num_cached_tokens = request.num_cached_tokens
        turn.admitted_s = now
        turn.job.queued_s += now - request.arrival_time
        pin = turn.frontier.pin if turn.frontier is not None else None
        if turn.frontier is not None and pin is None:
            self._queue_delay.observe(now - request.arrival_time)
        if turn.num_known_tokens:
            self._recomputed_share.observe(turn.num_known_tokens, turn.num_recomputed_tokens)
        self._trace.turn_admitted(turn, now)
        return () if pin is None else (pin,)

    # ---- a turn ends ----

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        turn = self._close_turn(request, now)
        if turn is None:
            return None
        self._kv_cost.observe(turn)
        if request.first_scheduled_time is not None and turn.job.course is not None:
            turn.job.course.end_turn(now - request.first_scheduled_time)
        receipt = self._receipts[request.request_id] = make_receipt(turn)
        self._log.ended(turn, receipt, now)
        self._trace.turn_ended(turn, now)
        if turn.job.is_finished or (request.job is not None and request.job.is_last_step):
            receipt.reason = "last step of the job"
            self._finish_job(turn.job, now)
            return None
        block_hashes = request.block_hashes[: request.num_computed_tokens // self._block_size]
        frontier = self._open_frontier(turn, block_hashes, receipt, now)
        return self._holding.begin(frontier, block_hashes, now)

    def on_request_gone(self, request: Request, now: float) -> None:
        self._break_rule.forget(request)
        turn = self._close_turn(request, now)
        if turn is None:
            return
        self._trace.turn_aborted(turn, now)
        if request.status is RequestStatus.FINISHED_ABORTED:
            self._cut_off(turn, now)
        if turn.frontier is not None:
            self._jobs.restore_frontier(turn.frontier)
            self._working_set.awaits(turn.frontier, now)
        if turn.job.is_finished:
            self._finish_job(turn.job, now)
        elif not turn.job.turns and not turn.job.frontiers and turn.job.is_inferred:
            self._jobs.remove(turn.job)
            self._trace.job_forgotten(turn.job, now)

    def _cut_off(self, turn: Turn, now: float) -> None:
        """Its client gave it up. It may have asked again before that was noticed."""
        self._cut_turns.remember(turn, now)
        if turn.num_cached_tokens is not None:
            return
        for again in turn.job.turns.values():
            waits = again.num_cached_tokens is None and again.repeats is None
            is_later = waits and again.number > turn.number
            if is_later and self._cut_turns.asks_the_same(again.request, turn.request):
                self._move_up(again, now)
                return

    def _move_up(self, turn: Turn, now: float) -> None:
        """It waits already when it shows that it repeats a turn."""
        cut = self._cut_turns.take(turn.request, now)
        if cut is not None:
            self._keep_place(turn, cut)
            self._wait_bound.arrived(turn.request, self._max_wait_s(turn), turn.waits_since_s)
            self._rank(turn)
            self._changed.append(turn.request)

    def take_receipt(self, request: Request) -> TurnReceipt | None:
        return self._receipts.pop(request.request_id, None)

    def _close_turn(self, request: Request, now: float) -> Turn | None:
        """The turn is over, however it ended: a pin it had come back to and never took over goes."""
        self._wait_bound.gone(request)
        self._working_set.went(request)
        turn = self._turns.pop(request.request_id, None)
        if turn is None:
            return None
        del turn.job.turns[request.request_id]
        self._jobs.end_turn(turn)
        self._jobs.touch(turn.job, now)
        if turn.frontier is not None and turn.frontier.pin is not None:
            self._pins.let_go(turn.frontier.pin)
        return turn

    def _open_frontier(
        self, turn: Turn, block_hashes: list[BlockHash], receipt: TurnReceipt, now: float
    ) -> Frontier:
        request, job = turn.request, turn.job
        frontier = Frontier(
            job,
            request.request_id,
            turn.number,
            BlockChain(block_hashes),
            request.num_prompt_tokens,
            ended_s=now,
            place=job.place,
            receipt=receipt,
            external_id=request.external_id,
            prompt_tail=prompt_tail(request, self._block_size),
            num_replies=request.job.num_replies if request.job is not None else None,
            num_results=request.job.num_results if request.job is not None else None,
            num_task_tokens=turn.num_task_tokens,
        )
        self._jobs.add_frontier(frontier, block_hashes)
        self._dead_ends.remember(frontier, block_hashes)
        self._working_set.awaits(frontier, now)
        self._frontiers[request.request_id] = frontier
        if len(job.frontiers) > MAX_FRONTIERS:
            self._drop_frontier(next((f for f in job.frontiers if f.pin is None), job.frontiers[0]))
        return frontier

    def expect_unnamed(self, job_ids: frozenset[str]) -> None:
        """These ids stand for jobs that nobody will name: each begins as a single question.

        For simulations of what was recorded, in which every turn comes with the id that its job was given.
        """
        self._jobs.unnamed = job_ids

    def choose_ttl(self, frontier: Frontier, inputs: TtlInputs) -> TtlDecision:
        """What the rule says; a subclass may know more than a rule is told."""
        return self._rule.choose_ttl(inputs)

    # ---- signals ----

    def on_signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        match signal:
            case ToolGapStarted():
                return self._tools_started(signal, now)
            case ToolSignal():
                return self._client_told(signal, now)
            case JobFinished():
                job = self._jobs.get(signal.job_id)
                if job is not None:
                    self._finish_job(job, now)
                return None

    def _tools_started(self, signal: ToolGapStarted, now: float) -> TurnReceipt | None:
        """The front end has read the turn: decide anew, knowing the tools. None if the gap is closed
        already."""
        frontier = self._frontiers.get(signal.request_id)
        if frontier is None:
            return None
        self._learn_tools(frontier, signal.calls, now)
        if not frontier.job.is_established:
            return self._holding.let_go(frontier, ONE_QUESTION)
        return self._holding.decide_anew(frontier, now)

    def _learn_tools(self, frontier: Frontier, calls: Sequence[ToolCall], now: float) -> None:
        """It is known what runs: whoever calls a tool has a job; whoever answers may have done it."""
        frontier.tools, frontier.plain_tool = self.tools.keys(calls), tool_name(calls)
        job = frontier.job
        if frontier.tools:
            self._jobs.establish(job)
        elif job.course is not None:
            job.course.looks_finished()
        frontier.receipt = copy(frontier.receipt)  # the first one is on its way to the client
        self._working_set.awaits(frontier, now)
        self._log.decided_anew(frontier)
        self._trace.tools_started(frontier, now)

    def _client_told(self, signal: ToolSignal, now: float) -> TurnReceipt | None:
        """Decide anew with what the client itself says of its calls. None if it speaks of no turn we know."""
        frontier = self._meant_by(signal)
        if frontier is None:
            return None
        if not frontier.tools and signal.tool is not None:
            self._learn_tools(frontier, [ToolCall(signal.tool)], now)
        frontier.told = frontier.told or Told()
        frontier.told.take(signal, now - frontier.ended_s, len(frontier.tools or ()))
        frontier.receipt = copy(frontier.receipt)
        self._log.decided_anew(frontier)
        self._working_set.awaits(frontier, now)
        self._trace.client_told(frontier, signal, now)
        if frontier.told.state is ToolState.CANCELLED:
            self._gaps.cut_off(frontier, now)
            return self._holding.let_go(frontier, CANCELLED)
        return self._holding.decide_anew(frontier, now, self._gaps.remaining(frontier, now))

    def _meant_by(self, signal: ToolSignal) -> Frontier | None:
        """The turn that is named, else the job's latest of which no result has come yet."""
        job = self._jobs.get(signal.job_id)
        latest_first = reversed(job.frontiers) if job is not None else iter(())
        named = signal.request_id
        return next((each for each in latest_first if named in (None, each.external_id)), None)

    # ---- jobs end ----

    def _finish_job(self, job: Job, now: float) -> None:
        """No turn will come any more: nothing of it is worth holding, nor of the turns that run, when they
        end."""
        if job.course is not None:
            job.course.looks_finished()
        for frontier in list(job.frontiers):
            self._gaps.was_last(frontier)
            self._drop_frontier(frontier)
        if not job.turns:
            self._jobs.remove(job)
            self._tally.job_ended(job, FINISHED)
        if not job.is_finished:
            job.is_finished = True
            self._trace.job_finished(job, now)

    def _drop_frontier(self, frontier: Frontier) -> None:
        self._jobs.remove_frontier(frontier)
        self._working_set.forget(frontier)
        self._dead_ends.forget(frontier)
        self._frontiers.pop(frontier.request_id, None)
        if frontier.pin is not None:
            self._pins.let_go(frontier.pin)

    def _abandon(self, job: Job, now: float) -> None:
        """Forgotten while its tools ran: they took at least so long. Nothing ran: it was done."""
        for frontier in list(job.frontiers):
            if frontier.tools:
                self._gaps.cut_off(frontier, now)
            else:
                self._gaps.was_last(frontier)
            self._drop_frontier(frontier)
        self._tally.job_ended(job, FORGOTTEN)
        self._trace.job_forgotten(job, now)

    # ---- who gives way ----

    def breakable(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        turn = self._turns.get(requester.request_id)
        return self._break_rule.breakable(requester, turn, now, last_resort)

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        """Of those of the worst priority the youngest program's turn, those of jobs with nothing else held
        first; least computed on a tie."""

        def worth(request: Request) -> tuple[int, bool, float, int]:
            turn, num_computed = self._turns.get(request.request_id), request.num_computed_tokens
            if turn is None:
                return (-request.priority, False, -request.arrival_time, num_computed)
            return (-request.priority, turn.job.num_pins > 0, -turn.job.rank, num_computed)

        return min(reversed(running), key=worth)

    # ---- the scheduler reports ----

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        return self._pins.due(now)

    def next_due_s(self) -> float | None:
        return 0.0 if self._dead_ends else self._pins.next_due_s()

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        frontier = self._pins.ended(pin, cause)
        self._trace.ended(pin, frontier, cause, by, now)
        if cause in (PinEnd.BROKEN, PinEnd.SUPERSEDED):
            for turn in frontier.job.turns.values():
                if turn.frontier is frontier and turn.num_cached_tokens is None:
                    self._changed.append(turn.request)

    def on_pin_shrunk(
        self, pin: Pin, num_blocks_lost: int, cause: PinEnd, now: float, by: str | None = None
    ) -> None:
        self._pins.shrunk(pin, num_blocks_lost)
        self._trace.shrunk(pin, num_blocks_lost, cause, by, now)

    def take_superseded(self) -> Iterator[DeadEnd]:
        return self._dead_ends.take()

    def pins(self) -> Iterable[Pin]:
        return self._pins

    # ---- who asks ----

    def job_of(self, request: Request) -> str | None:
        turn = self._turns.get(request.request_id)
        return None if turn is None else turn.job.job_id

    def take_job_stats(self) -> JobStats:
        return self._tally.take(self._jobs.num_established)

    def jobs(self, limit: int, now: float, owner: str | None = None) -> Sequence[JobStatus]:
        return [self._status(job, now) for job in self._jobs.newest(limit, owner)]

    def job(self, job_id: str, now: float) -> JobStatus | None:
        job = self._jobs.get(job_id)
        return None if job is None else self._status(job, now)

    def past_turns(self, job_id: str, now: float) -> Sequence[PastTurn]:
        return self._log.of_job(job_id, now)

    def _status(self, job: Job, now: float) -> JobStatus:
        frontiers = [
            frontier_status(frontier, self._gaps.remaining(frontier, now), self._block_size, now)
            for frontier in job.frontiers
        ]
        return job_status(job, frontiers, job.kind, now)

    def statistics(self) -> ContinuumStatistics:
        return ContinuumStatistics(
            len(self._jobs),
            len(self._turns),
            len(self._pins),
            self._pins.num_blocks,
            self._jobs.num_recognisable,
        )

    def describe(self) -> PolicyDescription:
        options = asdict(self._config)
        del options["estimator_state"]  # what was in the file is told, not where it is
        return PolicyDescription(self.name, options, self.tools.state())

    def close(self) -> None:
        self.tools.save()


@dataclass(frozen=True, slots=True)
class ContinuumPolicyFactory:
    """Makes the policy inside the core process."""

    config: ContinuumConfig

    def __call__(self, context: PolicyContext) -> SchedulingPolicy:
        return ContinuumPolicy(context, self.config)

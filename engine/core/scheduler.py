"""The V1 scheduler: every step hands one token budget to running requests first, then to waiting ones.

It owns the mechanism (queues, blocks, budget) and asks a SchedulingPolicy for every
choice. Pure: it is told the time and never looks at a clock, a socket or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.config import SchedulerConfig
from engine.core.block_hash import BlockHasher
from engine.core.block_pool import KVCacheBlock
from engine.core.fair_queue import FairQueue
from engine.core.input_trace import InputTrace
from engine.core.kv_cache_manager import NO_BLOCKS, KVCacheManager
from engine.core.kv_connector import KVConnector
from engine.core.load_holder import LoadHolder
from engine.core.pin_holder import PinHolder
from engine.core.request_queue import QueueEntry
from engine.core.scheduler_report import (
    PauseState,
    SchedulerStatistics,
    StepCounts,
    check_invariants_of,
    statistics_of,
    stats_of,
)
from engine.core.step_shares import StepLimit, StepShares
from engine.core.step_trace import StepTrace
from engine.core.steps_in_flight import StepsInFlight
from engine.core.tenant_seats import TenantSeats
from engine.core.token_grammar import TokenGrammar
from engine.core.trace_header import trace_header
from engine.messages import EngineCoreOutput, SchedulerStats, Signal, TurnReceipt
from engine.outputs import CachedRequestData, ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.policy import PinEnd, SchedulingPolicy
from engine.request import Request, RequestStatus
from engine.row_failures import GRAMMAR_LEFT, NOT_NUMBERS, processing_failed
from tracing.events import TraceHeader
from tracing.tracer import Tracer

MAX_SET_ASIDE = 16
"""Once a request found no room, so many are looked at for one that may pass it."""


@dataclass(slots=True)
class Step:
    """What one ``schedule()`` has decided so far."""

    now: float
    budget: int
    new: list[Request] = field(default_factory=list)
    resumed: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    awaits_blocks: bool = False
    """A running request is to have blocks that steps under way still use."""
    num_scheduled: dict[str, int] = field(default_factory=dict)
    new_blocks: dict[str, list[KVCacheBlock]] = field(default_factory=dict)
    limit: StepLimit | None = None
    """Where owners share it, of those that want much."""


class Scheduler:
    """Plans steps and applies their results. Not thread safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        policy: SchedulingPolicy,
        enable_prefix_caching: bool = True,
        tracer: Tracer | None = None,
        kv_connector: KVConnector | None = None,
        on_request_ended: Callable[[Request, float], None] | None = None,
    ) -> None:
        """``num_blocks`` counts the null block. ``kv_connector``: a second tier of KV; needs prefix
        caching. ``on_request_ended``: is told of each request once, and when; it must not raise."""
        assert kv_connector is None or enable_prefix_caching, "copies are found by the hashes of blocks"
        self.config = config
        self.policy = policy
        self.max_model_len = max_model_len
        self.kv = KVCacheManager(num_blocks, block_size, max_model_len, enable_prefix_caching)
        self.loads = LoadHolder(self.kv, kv_connector)
        self.pins = PinHolder(self.kv, self.loads, policy)
        self.request_block_hasher = BlockHasher(block_size) if enable_prefix_caching else None
        self.requests: dict[str, Request] = {}
        self.steps = StepsInFlight(
            self.kv, self.requests, max_model_len, overlap=bool(config.async_scheduling)
        )
        self.seats = TenantSeats()
        self.shares = StepShares()
        self.waiting = FairQueue(self.seats, policy.is_overdue)
        self.compiling: dict[str, Request] = {}
        """Requests whose grammar is awaited; they stand in nobody's way."""
        self.running: list[Request] = []
        self.pause_state = PauseState.UNPAUSED
        self.made_room = False
        """The last plan took blocks or a seat from somebody and may not have handed them on: another one,
        made at once, may run more."""
        self.constrained: dict[str, Request] = {}
        """Requests with a grammar."""
        self._finished_req_ids: set[str] = set()
        self._counts = StepCounts()
        self._on_request_ended = on_request_ended
        self._tracer = tracer or Tracer()
        self._trace = StepTrace(self._tracer)
        self._inputs = InputTrace(self._tracer, self._trace, block_size)

    # ---- what comes in ----

    def add_request(self, request: Request, now: float) -> None:
        """Queue a request. Its id must be new and its length within ``max_model_len``. One that follows a
        grammar has arrived and keeps its place, but is not in the queue before ``grammar_compiled``."""
        assert request.request_id not in self.requests, "request ids are unique"
        reads = self._inputs.watch(request) if self._tracer.on else None
        self.policy.on_arrival(request, now)
        if reads is not None:
            self._inputs.request_arrived(request, reads, now)
        self.requests[request.request_id] = request
        self.shares.arrived(request, now)
        if request.status is RequestStatus.WAITING:
            self.waiting.add(request, self.policy.waiting_key(request, now))
        else:
            self.compiling[request.request_id] = request
            self.waiting.keep_place(request)

    def grammar_compiled(self, request: Request, grammar: TokenGrammar, now: float) -> None:
        """A request that awaited its grammar may run, unless it has ended meanwhile."""
        if self.compiling.get(request.request_id) is not request:
            return
        del self.compiling[request.request_id]
        request.grammar = grammar
        request.status = RequestStatus.WAITING
        self.constrained[request.request_id] = request
        self.waiting.add(request, self.policy.waiting_key(request, now))
        if self._tracer.on:
            self._inputs.grammar_ready(request, now)

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, now: float
    ) -> list[EngineCoreOutput]:
        """End requests from outside, at any moment, also while a planned step runs: its blocks are not handed
        on before the next ``schedule``, nor while a step that uses them is under way. Unknown ids are those
        that ended already.

        FINISHED_STOPPED (the front end saw a stop string) ends a turn like EOS does; other states give up
        what the request held.
        """
        assert status.finished
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            elif self.compiling.pop(request_id, None) is not None:
                self.waiting.give_up_place(request)
            elif not self.loads.remove(request):
                self.waiting.remove(request)
            request.status = status
            outputs.append(self._finish(request, [], now))
        if self._tracer.on:
            self._inputs.requests_ended(outputs, status, now)
        return outputs

    def signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        """A tool call or a job changed state; the receipt is the policy's new decision about the turn."""
        receipt = self.policy.on_signal(signal, now)
        self.pins.expire(now)
        if self._tracer.on:
            self._inputs.signal(signal, receipt, now)
        return receipt

    def set_pause_state(self, state: PauseState, now: float) -> None:
        self.pause_state = state
        if self._tracer.on:
            self._inputs.paused(state.value, now)

    # ---- one step ----

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide what runs next. Every scheduled token counts as computed from here on.

        With ``async_scheduling`` one earlier plan may still be under way: the tokens it samples are planned
        for without being known.
        """
        self.pins.expire(now)
        self._requeue_changed(now)
        paused_all = self.pause_state is PauseState.PAUSED_ALL
        step = Step(now, 0 if paused_all else self.config.max_num_batched_tokens)
        if self._tracer.on:
            self._trace.snapshot(self.running, self.waiting, self.loads, self.kv, step.budget, now)
        if self.shares.is_shared and self.config.enable_chunked_prefill:
            step.limit = self.shares.limit(self.running, self.waiting.peek(), now)
        num_free_before = self.kv.num_free_blocks
        self._schedule_running(step)
        may_admit = not step.preempted and not step.awaits_blocks
        may_admit = may_admit and self.pause_state is PauseState.UNPAUSED
        if may_admit and self._schedule_loaded(step) and self.waiting:
            self._schedule_waiting(step)
        self.made_room = bool(step.preempted) or self.kv.num_free_blocks > num_free_before
        assert step.budget >= 0
        assert self._num_seats <= self.config.max_num_seqs
        assert len(step.num_scheduled) <= len(self.running)
        plan = self._make_output(step)
        if self.shares.is_shared:
            self.shares.planned(plan, now)
        self._advance(plan)
        self.loads.fill_in(plan, self.requests)
        if self._tracer.on:
            self._trace.decision(
                step.new, step.resumed, step.running, step.preempted, plan, self.kv.num_free_blocks
            )
        return plan

    def sampled_grammars(self, plan: SchedulerOutput) -> dict[str, TokenGrammar]:
        """The grammars of the requests that a plan under way samples a token of, by request id."""
        return {
            request_id: request.grammar
            for request_id, request in self.constrained.items()
            if request.grammar is not None and self.steps.samples(plan, request)
        }

    @property
    def _num_seats(self) -> int:
        """Places in the batch that are taken, those kept for requests that are being loaded included."""
        return len(self.running) + self.loads.num_requests

    def _schedule_running(self, step: Step) -> None:
        """Let running requests catch up, oldest admission first; preempt where blocks run out."""
        index = 0
        running = self.running
        most_tokens = self._prefill_limit(self.max_model_len)
        while index < len(running) and step.budget > 0:
            request = running[index]
            num_tokens = request.num_tokens + request.num_output_placeholders
            num_computed = request.num_computed_tokens
            num_new = min(
                num_tokens - num_computed, most_tokens, step.budget, self.max_model_len - num_computed
            )
            if step.limit is not None:
                num_new = step.limit.of_running(request, num_new)
            if num_new <= 0:
                index += 1
                continue
            blocks = self.kv.allocate_slots(request, num_new)
            while blocks is None:
                num_needed = request.num_computed_tokens + num_new
                if self._soon_has_room(request, num_needed, NO_BLOCKS):
                    step.awaits_blocks = True
                    break
                if not self._break_pins_for(request, num_needed, NO_BLOCKS, step.now):
                    victim = self.policy.victim(self._givers(), request, step.now)
                    index -= self._preempt(victim, step, index)
                    if victim is request:
                        index -= 1  # those behind it have moved up, and may have room now
                        break
                blocks = self.kv.allocate_slots(request, num_new)
            else:
                step.running.append(request)
                self._commit(request, num_new, blocks, step)
            index += 1

    def _schedule_loaded(self, step: Step) -> bool:
        """Let requests run whose load has ended: they have all their blocks. False if one needs more budget
        than is left, which must not go to others then."""
        for request in self.loads.ready:
            num_new = self._prefill_limit(request.num_tokens - request.num_computed_tokens)
            if not step.budget or (num_new > step.budget and not self.config.enable_chunked_prefill):
                return False
            num_new = self._limited(request, min(num_new, step.budget), step)
            if not num_new:
                continue
            blocks = self.kv.allocate_slots(request, num_new)
            assert blocks == [], "a load comes with room for all tokens"
            self.loads.remove(request)
            self._start(request, num_new, blocks, step)
        return True

    def _schedule_waiting(self, step: Step) -> None:
        """Admit waiting requests in the policy's order until one does not fit; some may pass it."""
        set_aside: list[QueueEntry] = []
        behind_unfit = False
        while step.budget > 0 and self._has_seat(step):
            request = self.waiting.peek()
            if request is None or request in step.preempted:
                break
            if step.limit is not None and not step.limit.of_new(request, 1):
                if not self.waiting.defer(request.tenant):
                    break
                continue
            may_pass = not behind_unfit or self.policy.may_pass(request, step.now)
            if may_pass and self.policy.may_admit(request, self.kv.num_free_blocks, step.now):
                if self._admit(request, step):
                    continue
                if step.preempted:  # for it, and blocks that they have are still in use
                    break
                behind_unfit = True
            elif may_pass and self.policy.lets_pass:
                behind_unfit = True
            if behind_unfit and not self._look_further(request, may_pass, len(set_aside)):
                break
            set_aside.append(self.waiting.set_aside())
        for entry in set_aside:
            self.waiting.put_back(entry)
        if step.limit is not None:
            self.waiting.resume()

    def _has_seat(self, step: Step) -> bool:
        """Whether a place in the batch is free, if need be one that the tenant with most gives up to who is
        next."""
        if self._num_seats < self.config.max_num_seqs:
            return True
        request = self.waiting.peek() if self.waiting.is_contended else None
        if request is None or request in step.preempted:
            return False
        given = self._given_to(request, step)
        if given:
            self._preempt(self.policy.victim(given, request, step.now), step, 0)
        return bool(given)

    def _given_to(self, request: Request, step: Step) -> list[Request]:
        """Requests that the tenant with most places may lose to one of a tenant with at least two less; none
        that this step has begun, nor any whose blocks others have hit in this step."""
        giver = self.seats.owes(request.tenant)
        if giver is None:
            return []
        begun = {each.request_id for each in (*step.new, *step.resumed)}
        return [
            each
            for each in self.running
            if each.tenant == giver
            and each.request_id not in begun
            and not self.kv.are_shared(each, step.num_scheduled.get(each.request_id, 0))
        ]

    def _take_room(self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock], step: Step) -> bool:
        """Preempt requests of the tenant with most places until this one has room; none where what may be
        taken is not enough. False also if their blocks are still used: then there is room in a moment."""
        most = self.seats.owes(request.tenant)
        if most is None:
            return False
        given, chosen, num_given = self._given_to(request, step), list[Request](), 0
        num_short = self.kv.num_blocks_short(request, num_tokens, hit)
        may_take = self.seats.held(most) - self.seats.held(request.tenant) - 1
        while given and num_given < num_short and len(chosen) < may_take:
            victim = self.policy.victim(given, request, step.now)
            given.remove(victim)
            chosen.append(victim)
            num_given += self.kv.num_blocks_of(victim.request_id)
        if num_given < num_short:
            return False
        for victim in chosen:
            self._preempt(victim, step, 0)
        return self.kv.num_blocks_short(request, num_tokens, hit) <= 0

    def _givers(self) -> list[Request]:
        """Running requests of which one may be preempted: where several tenants run, of those with most."""
        if len(self.seats) <= 1:
            return self.running
        richest = self.seats.richest()
        return [request for request in self.running if request.tenant in richest] or self.running

    def _look_further(self, request: Request, may_pass: bool, num_set_aside: int) -> bool:
        """Whether somebody behind this one may pass those without room: in the queue's order those that may
        come first, but for preempted ones."""
        if not self.policy.lets_pass or num_set_aside >= MAX_SET_ASIDE:
            return False
        return may_pass or request.status is RequestStatus.PREEMPTED

    def _admit(self, request: Request, step: Step) -> bool:
        """Move the head of the queue, which this is, to running if its blocks can be had; to the loading ones
        if another tier has more of its prefix."""
        if self._surely_short(request, step.now):
            return False
        hit, num_hit_tokens = self.kv.get_computed_blocks(request)
        num_loadable = self.loads.num_loadable_tokens(request, num_hit_tokens)
        if num_loadable:
            return self._start_load(request, hit, num_loadable, step)
        num_new = self._prefill_limit(request.num_tokens - num_hit_tokens)
        if num_new > step.budget and not self.config.enable_chunked_prefill:
            return False
        num_new = self._limited(request, min(num_new, step.budget), step)
        if not num_new:
            return False
        num_reserved = (
            request.num_tokens if self.config.scheduler_reserve_full_isl else num_hit_tokens + num_new
        )
        if not self._find_room(request, num_reserved, hit, step):
            return False
        blocks = self.kv.allocate_slots(request, num_new, hit)
        assert blocks is not None, "room was checked"
        self._seat(request)
        request.num_computed_tokens = num_hit_tokens
        self._start(request, num_new, blocks, step)
        self._note_admission(request, num_hit_tokens, step.now)
        return True

    def _start_load(self, request: Request, hit: Sequence[KVCacheBlock], num_tokens: int, step: Step) -> bool:
        """Admit the head of the queue to be loaded first, if there is room for all its tokens: so that
        nothing it waits for later can be held by another one that waits."""
        if not self._find_room(request, request.num_tokens, hit, step):
            return False
        self._seat(request)
        self.loads.start(request, hit, num_tokens)
        self._note_admission(request, request.num_computed_tokens + num_tokens, step.now)
        return True

    def _find_room(self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock], step: Step) -> bool:
        """Whether a waiting request has room for ``num_tokens``, if need be after pins were broken, or
        requests of a tenant with more places preempted."""
        if self.kv.num_blocks_short(request, num_tokens, hit) <= 0:
            return True
        if self._soon_has_room(request, num_tokens, hit):
            return False
        if self._break_pins_for(request, num_tokens, hit, step.now):
            return True
        if self._take_room(request, num_tokens, hit, step):
            return self.kv.are_cached(hit)  # else a victim was to compute some of it in this step
        self.kv.note_shortage(request, hit)
        return False

    def _surely_short(self, request: Request, now: float) -> bool:
        """Whether looking for room again is in vain: a long prompt's look-up costs as much as a step."""
        if not self.running or not self.config.scheduler_reserve_full_isl:
            return False
        if self.seats.owes(request.tenant) is not None:
            return False
        missing = self.kv.num_surely_missing(request)
        if missing > 0 and self.kv.num_pins:
            for pin in self.policy.breakable(request, now, last_resort=False):
                missing -= pin.num_blocks
                if missing <= 0:
                    return False
        return missing > 0

    def _seat(self, request: Request) -> None:
        """A waiting request has a place in the batch."""
        is_overdue = self.policy.is_overdue(request)
        self.waiting.remove(request)
        self.seats.take(request, is_overdue=is_overdue)
        self.waiting.touch(request.tenant)

    def _leave_seat(self, request: Request) -> None:
        if self.seats.give_back(request):
            self.waiting.touch(request.tenant)

    def _note_admission(self, request: Request, num_cached_tokens: int, now: float) -> None:
        """The request has got its blocks; ``num_cached_tokens`` need not be computed, or soon will not."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
        self.pins.end_all(self.policy.on_admitted(request, now), PinEnd.HANDED_OVER, now)

    def _start(self, request: Request, num_new: int, blocks: list[KVCacheBlock], step: Step) -> None:
        """An admitted request joins the batch."""
        if self._tracer.on:
            self._trace.prefix_cache(request, self.policy.job_of(request), step.now)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = step.now
            self._counts.prefix_cache_queries += request.num_tokens
            self._counts.prefix_cache_hits += (
                request.num_computed_tokens - request.num_external_computed_tokens
            )
        (step.resumed if request.status is RequestStatus.PREEMPTED else step.new).append(request)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if step.limit is not None:
            step.limit.started(request, num_new)
        self._commit(request, num_new, blocks, step)

    def _prefill_limit(self, num_tokens: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        return min(num_tokens, threshold) if threshold else num_tokens

    @staticmethod
    def _limited(request: Request, num_new: int, step: Step) -> int:
        """Of so many tokens, those that the step has for one that is to be started."""
        return num_new if step.limit is None else step.limit.of_new(request, num_new)

    def _commit(self, request: Request, num_new: int, blocks: list[KVCacheBlock], step: Step) -> None:
        step.num_scheduled[request.request_id] = num_new
        step.new_blocks[request.request_id] = blocks
        step.budget -= num_new

    def _preempt(self, victim: Request, step: Step, index: int) -> int:
        """Give up a running request's blocks; it starts over from the head of the queue.

        Returns 1 if the victim stood before ``index`` in the running list, so that the index moves with it.
        """
        position = self.running.index(victim)
        del self.running[position]
        num_withdrawn = step.num_scheduled.pop(victim.request_id, None)
        if num_withdrawn is not None:
            step.running.remove(victim)
            del step.new_blocks[victim.request_id]
            step.budget += num_withdrawn
        self.steps.let_go(victim)
        self.loads.release(victim)
        self.kv.free(victim, victim.num_computed_tokens if num_withdrawn is not None else None)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = victim.num_external_computed_tokens = victim.num_disk_tokens = 0
        victim.num_preemptions += 1
        step.preempted.append(victim)
        self._leave_seat(victim)
        self._counts.num_preemptions += 1
        self.waiting.prepend(victim, self.policy.waiting_key(victim, step.now))
        return int(position < index)

    def _make_output(self, step: Step) -> SchedulerOutput:
        new_blocks = step.new_blocks
        cached = CachedRequestData()
        for request in step.running:
            cached.req_ids.append(request.request_id)
            blocks = new_blocks[request.request_id]
            cached.new_block_ids.append([block.block_id for block in blocks] if blocks else [])
            cached.num_computed_tokens.append(request.num_computed_tokens)
        for request in step.resumed:
            cached.req_ids.append(request.request_id)
            cached.resumed_req_ids.add(request.request_id)
            cached.resumed_token_ids[request.request_id] = list(request.all_token_ids)
            cached.new_block_ids.append(self.kv.block_ids(request.request_id))
            cached.num_computed_tokens.append(request.num_computed_tokens)
        plan = SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=request.all_token_ids[: request.num_prompt_tokens],
                    sampling_params=request.sampling_params,
                    block_ids=self.kv.block_ids(request.request_id),
                    num_computed_tokens=request.num_computed_tokens,
                )
                for request in step.new
            ],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=step.num_scheduled,
            total_num_scheduled_tokens=sum(step.num_scheduled.values()),
            finished_req_ids=self._finished_req_ids,
            preempted_req_ids={request.request_id for request in step.preempted},
        )
        self._finished_req_ids = set()
        return plan

    def _advance(self, plan: SchedulerOutput) -> None:
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_tokens
        self._counts.step_tokens += plan.total_num_scheduled_tokens
        self.steps.begin(plan)

    # ---- what comes back ----

    def update_from_output(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float
    ) -> list[EngineCoreOutput]:
        """Append what was sampled, end what is done; the outputs are for the front end. What was sampled of
        a request that has ended meanwhile is dropped."""
        requests = self.steps.end(plan, now)
        if self.shares.is_shared:
            self.shares.ended(plan, now)
        traced = self._inputs.begin_output(result, requests) if self._tracer.on else None
        self.loads.end_disk_writes(result.finished_disk_writes, result.failed_disk_writes)
        self.loads.end(result.finished_loads, loaded=True)
        self.loads.end(result.failed_loads, loaded=False)
        outputs: list[EngineCoreOutput] = []
        any_finished = False
        for request_id, token_ids in zip(result.req_ids, result.sampled_token_ids, strict=True):
            request = requests.get(request_id)
            if request is None or not token_ids:
                continue
            status = request.status
            is_first = request.first_token_time is None
            if is_first:
                request.first_token_time = now
            if request_id in result.failed:
                num_taken = self._fail(request, result.failed[request_id])
            else:
                num_taken = self._append_tokens(request, token_ids)
            logprobs = result.logprobs.get(request_id) if result.logprobs else None
            if request.status is status:
                output = EngineCoreOutput(request_id, token_ids)
            else:
                any_finished = True
                if status is RequestStatus.PREEMPTED:  # while this token was under way
                    self.waiting.remove(request)
                output = self._finish(request, token_ids[:num_taken], now)
            output.new_logprobs = logprobs[:num_taken] if logprobs else None
            if is_first:
                self._describe_start(request, output)
            outputs.append(output)
        if any_finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        if traced is not None:
            self._inputs.step_output(traced, plan, result, outputs, now)
        return outputs

    def _append_tokens(self, request: Request, token_ids: Sequence[int]) -> int:
        """Append tokens up to the one that ends the request; returns how many were taken."""
        status = request.status
        for count, token_id in enumerate(token_ids, start=1):
            request.append_output_token(token_id)
            num_tokens = request.num_tokens
            num_output = num_tokens - request.num_prompt_tokens
            if num_output >= request.max_tokens or num_tokens >= self.max_model_len:
                request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            if token_id in request.ending_token_ids and num_output >= request.sampling_params.min_tokens:
                request.status = RequestStatus.FINISHED_STOPPED
                if token_id != request.sampling_params.eos_token_id:
                    request.stop_reason = token_id
            if request.grammar is not None:
                self._follow_grammar(request, request.grammar, token_id)
            if request.status is not status:
                return count
        return len(token_ids)

    @staticmethod
    def _fail(request: Request, reason: str) -> int:
        """The request ends with an error of its own, and without a token more."""
        request.status = RequestStatus.FINISHED_ERROR
        request.stop_reason = reason
        return 0

    def _follow_grammar(self, request: Request, grammar: TokenGrammar, token_id: int) -> None:
        """Whatever its own length would say, a request ends where its grammar does."""
        try:
            accepted, complete = grammar.accept(token_id), grammar.complete
        except Exception as error:  # a library's: of this request alone, so it is nobody else's
            self._fail(request, processing_failed("The grammar", error))
            return
        if not accepted:
            self._fail(request, GRAMMAR_LEFT)
        elif complete:
            request.status = RequestStatus.FINISHED_STOPPED

    def _finish(self, request: Request, token_ids: list[int], now: float) -> EngineCoreOutput:
        """The request has left its queue and its status says how it ended: settle its blocks."""
        request_id = request.request_id
        self._leave_seat(request)
        self.shares.gone(request)
        self.steps.leave(request)
        pin = None
        if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            pin = self.policy.on_turn_end(request, now)
        else:
            self.policy.on_request_gone(request, now)
        self.loads.release(request)
        if request.stop_reason == NOT_NUMBERS:  # from a token on, or from whoever computed its prefix
            self.kv.forget(request)
            self.loads.forget(request)
        if pin is not None:
            self.pins.hold(request, pin, now)
        else:
            self.kv.free(request)
        del self.requests[request_id]
        if request.grammar is not None:
            del self.constrained[request_id]
        self._finished_req_ids.add(request_id)
        output = EngineCoreOutput(
            request_id,
            token_ids,
            finish_reason=request.status.finish_reason,
            stop_reason=request.stop_reason,
            receipt=self.policy.take_receipt(request),
        )
        if self._on_request_ended is not None:
            self._on_request_ended(request, now)
        self._describe_start(request, output)
        self.pins.expire(now)
        return output

    def _describe_start(self, request: Request, output: EngineCoreOutput) -> None:
        output.num_cached_tokens = request.num_cached_tokens or 0
        output.num_preemptions = request.num_preemptions
        if request.first_scheduled_time is not None:
            output.queued_s = request.first_scheduled_time - request.arrival_time

    # ---- pins ----

    def expire(self, now: float) -> None:
        """End the pins whose deadline has passed or that the policy let go."""
        self.pins.expire(now)
        if self._tracer.on:
            self._inputs.idle(now)

    def next_due_s(self) -> float | None:
        """When ``expire`` will next have something to do."""
        return self.policy.next_due_s()

    def _break_pins_for(
        self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock], now: float
    ) -> bool:
        """Break pins until the request has room for ``num_tokens``; all may go if nothing else runs."""
        if not self.kv.num_pins:
            return False
        # What is being loaded will run, or leave its blocks: wait for it first.
        is_loading = self.loads.num_requests or self.loads.num_in_flight
        last_resort = self._runs_alone(request) and not is_loading
        return self.pins.make_room(request, num_tokens, hit, now, last_resort=last_resort)

    def _runs_alone(self, request: Request) -> bool:
        """Nothing runs but perhaps this one."""
        return not self.running or (len(self.running) == 1 and self.running[0] is request)

    def _soon_has_room(self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock]) -> bool:
        """Whether blocks that steps under way still use make up for those that are short: then nobody is to
        lose any. Who runs alone waits for them in any case."""
        if not self.kv.has_fences:
            return False
        num_short = self.kv.num_blocks_short(request, num_tokens, hit)
        return self._runs_alone(request) or num_short <= self.kv.num_returning_blocks

    def _requeue_changed(self, now: float) -> None:
        for request in self.policy.changed_keys():
            if request in self.waiting:
                self.waiting.rekey(request, self.policy.waiting_key(request, now))

    # ---- the rest ----

    def reset_prefix_cache(self, now: float) -> bool:
        """End all pins, then forget all cached prefixes, on every tier; False, and no change, while requests
        or loads hold blocks."""
        done = self.kv.only_pins_hold and not self.loads.num_in_flight
        if done:
            self.pins.end_all(list(self.policy.pins()), PinEnd.RELEASED, now)
            done = self.kv.reset_prefix_cache() and self.loads.reset_cache()
            assert done, "nobody held anything"
        if self._tracer.on:
            self._inputs.prefix_cache_reset(done, now)
        return done

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    @property
    def num_pending_loads(self) -> int:
        """Loads that the worker has yet to report: it must be asked, with a plan of no tokens if need be."""
        return self.loads.num_in_flight

    def make_stats(self) -> SchedulerStats:
        """Gauges now and counts since the last call."""
        counts, self._counts = self._counts, StepCounts()
        return stats_of(self, counts)

    def statistics(self) -> SchedulerStatistics:
        return statistics_of(self)

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues, requests, pins and blocks agree with each other."""
        check_invariants_of(self)

    def close(self, now: float) -> None:
        """The engine stops: every pin has its end, and the policy saves what must survive."""
        self.pins.end_all(list(self.policy.pins()), PinEnd.RELEASED, now)
        if self._tracer.on:
            self._inputs.closed(now)
        self.policy.close()

    # ---- the trace ----

    def begin_trace(self, wall_time_s: float, now: float, *, from_start: bool) -> TraceHeader:
        """What a trace that begins now begins with. ``from_start``: nothing has come in yet."""
        self._inputs.begin()
        return trace_header(self, wall_time_s, now, from_start=from_start)

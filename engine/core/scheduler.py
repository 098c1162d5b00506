"""The scheduler, as in vLLM V1: each step hands one token budget to running requests, then to waiting ones.

This file follows a request from top to bottom: it is added and waits, is admitted with its cached prefix,
runs step by step, gets the tokens that were sampled, and ends. Unlike in V1, a policy makes every choice, the
blocks of a turn that ended may be pinned for the next one, and what another tier holds is loaded before the
request runs.

Pure: the time is an argument, and the scheduler never reads a clock, a socket or a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from engine.config.engine_config import SchedulerConfig
from engine.core.append_tokens import append_tokens
from engine.core.core_outputs import describe_start, last_output
from engine.core.draft_tokens import DraftTokens
from engine.core.encoder_cache_manager import EncoderCacheManager
from engine.core.fairness.fair_preemption import FairPreemption
from engine.core.fairness.fair_queue import FairQueue
from engine.core.fairness.tenant_slots import TenantSlots
from engine.core.kv_cache.block_hash import BlockHasher
from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.kv_cache.kv_cache_manager import NO_BLOCKS, KVCacheManager
from engine.core.kv_cache.tiered_blocks import LoadablePrefix
from engine.core.kv_leases import KVLeases
from engine.core.offload.kv_connector import KVConnector, NoConnector
from engine.core.offload.pending_kv_loads import PendingKVLoads
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.part_order import in_order, own_parts
from engine.core.parts import Left, SchedulerPart
from engine.core.pin_manager import PinManager
from engine.core.policy import PinEnd, SchedulingPolicy
from engine.core.request import Request, RequestStatus
from engine.core.scheduler_report import (
    PauseState,
    SchedulerStatistics,
    StepCounts,
    check_invariants_of,
    statistics_of,
    stats_of,
)
from engine.core.step import Step
from engine.core.steps_in_flight import StepsInFlight, max_tokens_under_way
from engine.core.token_grammar import TokenGrammar
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from engine.records.messages import EngineCoreOutput, Signal, TurnReceipt
from engine.records.reported_stats import SchedulerStats
from engine.records.row_failures import KV_SPOILED

MAX_SET_ASIDE = 256
"""The most waiting requests that a step passes over, since a limit lets only others start."""
MAX_SKIPPED = 16
"""The most waiting requests that a step skips, once one has not fit, to find one that may pass it."""


class Scheduler:
    """Plans steps and applies their results, one caller at a time."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        policy: SchedulingPolicy,
        enable_prefix_caching: bool = True,
        kv_connector: KVConnector | None = None,
        loads_remote: bool = False,
        kv_cache_groups: Sequence[KVCacheGroup] = ONE_FULL_GROUP,
        num_states: int = 0,
        num_stages: int = 1,
        on_request_ended: Callable[[Request, float], None] | None = None,
    ) -> None:
        """Make one over a pool of ``num_blocks`` blocks of any group, including the null block.

        ``kv_connector`` is a second tier of KV, which needs prefix caching. ``loads_remote``: requests may
        name a prefix of another server. ``num_states``: state slots, slot 0 included, if the last group has
        states. ``num_stages``: of a pipeline. ``on_request_ended``: called once for each; must not raise.
        """
        self.config = config
        self.policy = policy
        self.max_model_len = max_model_len
        limits = (kv_cache_groups, max_tokens_under_way(config, num_stages), num_states)
        self.kv = KVCacheManager(num_blocks, block_size, max_model_len, enable_prefix_caching, *limits)
        self.loads = PendingKVLoads(self.kv, kv_connector or NoConnector(), loads_remote=loads_remote)
        self.leases = KVLeases(self.kv)
        self.pins = PinManager(self.kv, self.loads, policy, self.leases)
        self.request_block_hasher = BlockHasher(block_size) if enable_prefix_caching else None
        self.requests: dict[str, Request] = {}
        overlap = bool(config.async_scheduling)
        self.steps = StepsInFlight(self.kv, self.requests, max_model_len, num_stages, overlap=overlap)
        self.drafts = DraftTokens(self.kv, max_model_len)
        self.parts = own_parts(config, self.kv, self.drafts, self.leases)
        self.slots = TenantSlots()
        self._fairness = FairPreemption(self.kv, self.slots, policy)
        self.waiting = FairQueue(self.slots, policy.is_overdue)
        self.compiling: dict[str, Request] = {}
        """Requests that wait for their grammar to be compiled; later ones go first."""
        self.running = list[Request]()
        self.pause_state = PauseState.UNPAUSED
        self.replan_at_once = False
        """Whether the last plan freed blocks or a slot and may not have reused them: another plan, made at
        once, may then schedule more."""
        self.constrained: dict[str, Request] = {}
        """Requests that follow a grammar."""
        self._finished_req_ids: set[str] = set()
        self._counts = StepCounts()
        self._on_request_ended = on_request_ended
        policy.see_cache(self._cached_tokens)

    def add_parts(self, *parts: SchedulerPart) -> None:
        """Add parts; called before the first request."""
        self.parts = in_order((*self.parts.all, *parts))

    @property
    def encoder(self) -> EncoderCacheManager | None:
        """The encoder cache of a model that reads pictures or audio; it may be set, too."""
        return self.parts.find(EncoderCacheManager)

    @encoder.setter
    def encoder(self, encoder: EncoderCacheManager) -> None:
        self.add_parts(encoder)

    # ---- what comes in ----

    def add_request(self, request: Request, now: float) -> None:
        """Queue a request with a new id and a length within ``max_model_len``.

        One that follows a grammar keeps its place, but is in the queue only from ``grammar_compiled`` on.
        """
        assert request.request_id not in self.requests, "request ids are unique"
        self.policy.on_arrival(request, now)
        self.requests[request.request_id] = request
        self.parts.arrived(request, now)
        if request.status is RequestStatus.WAITING:
            self.waiting.add(request, self.policy.waiting_key(request, now))
        else:
            self.compiling[request.request_id] = request
            self.waiting.keep_place(request)

    def grammar_compiled(self, request: Request, grammar: TokenGrammar, now: float) -> None:
        """Queue a request that waited for its grammar, unless it has ended meanwhile."""
        if self.compiling.get(request.request_id) is not request:
            return
        del self.compiling[request.request_id]
        request.grammar = grammar
        request.status = RequestStatus.WAITING
        self.constrained[request.request_id] = request
        self.waiting.add(request, self.policy.waiting_key(request, now))

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, now: float
    ) -> list[EngineCoreOutput]:
        """End requests from outside, at any moment; unknown ids have ended already.

        Blocks that a step under way uses are not reused before it returns. FINISHED_STOPPED (the API server
        process saw a stop string) ends a turn as EOS does: its blocks may be pinned.
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
        return outputs

    def signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        """Inform the policy that a tool call or a job changed state; returns its new decision on the turn."""
        receipt = self.policy.on_signal(signal, now)
        self.pins.after_signal(now)
        return receipt

    def set_pause_state(self, state: PauseState, now: float) -> None:
        """Change what may still be scheduled. Only a trace uses ``now``."""
        self.pause_state = state

    # ---- one step ----

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step, whose tokens count as computed from here on.

        With ``async_scheduling`` tokens are scheduled before the step under way has sampled them.
        """
        return self.plan(self.begin_step(now))

    def begin_step(self, now: float) -> Step:
        """The first half of ``schedule``: end the pins that are due, and sort the queue again."""
        self.pins.expire(now)
        for request in self.policy.changed_keys(now):
            if request in self.waiting:
                self.waiting.rekey(request, self.policy.waiting_key(request, now))
        paused_all = self.pause_state is PauseState.PAUSED_ALL
        budget = 0 if paused_all else self.config.max_num_batched_tokens
        return Step(now, budget)

    def plan(self, step: Step) -> SchedulerOutput:
        """The second half of ``schedule``: hand out the step's budget, to running requests first."""
        step.limits = self.parts.limits(step, self)
        num_free_before = self.kv.num_free_blocks
        num_held = self.drafts.hold(step, len(self.running))
        self._schedule_running(step)
        is_short = bool(step.preempted) or step.awaits_blocks
        may_admit = not is_short and self.pause_state is PauseState.UNPAUSED
        if may_admit and self._schedule_loaded(step) and self.waiting:
            self._schedule_waiting(step)
        self.drafts.place(step, num_held, self._prefill_limit(self.max_model_len))
        self.replan_at_once = bool(step.preempted) or self.kv.num_free_blocks > num_free_before
        assert step.budget >= 0
        assert self._num_slots <= self.config.max_num_seqs
        assert len(step.num_scheduled) <= len(self.running)
        return self._make_plan(step)

    def _schedule_running(self, step: Step) -> None:
        """Let running requests catch up, in the order of their admission; preempt where blocks run out."""
        index = 0
        running = self.running
        most_tokens = self._prefill_limit(self.max_model_len)
        most_running = self.steps.most_running(len(running))
        while index < len(running) and step.budget > 0 and len(step.running) < most_running:
            request = running[index]
            num_tokens = request.num_tokens + request.num_output_placeholders
            num_computed = request.num_computed_tokens
            num_new = min(
                num_tokens - num_computed, most_tokens, step.budget, self.max_model_len - num_computed
            )
            if step.limits and num_new > 0:
                num_new = step.chunk(request, num_computed, num_new)
            if num_new <= 0:
                index += 1
                continue
            blocks = self.kv.allocate_slots(request, num_new)
            while blocks is None:
                num_needed = request.num_computed_tokens + num_new
                if self._will_fit_after_inflight(request, num_needed, NO_BLOCKS):
                    step.awaits_blocks = True
                    break
                if not self._revoke_pins_for(request, num_needed, NO_BLOCKS, step.now):
                    victim = self.policy.victim(self._fairness.candidates(running), request, step.now)
                    index -= self._preempt(victim, step, index)
                    if victim is request:
                        index -= 1  # later ones have moved up, and may fit now
                        break
                blocks = self.kv.allocate_slots(request, num_new)
            else:
                step.running.append(request)
                step.commit(request, num_new, blocks)
            index += 1

    def _schedule_loaded(self, step: Step) -> bool:
        """Start requests whose load has ended and which have all their blocks.

        False if one needs more budget than is left, which others must then not take.
        """
        for request in self.loads.ready:
            num_new = self._prefill_limit(request.num_tokens - request.num_computed_tokens)
            if not step.budget or (num_new > step.budget and not self.config.enable_chunked_prefill):
                return False
            num_new = step.chunk(request, request.num_computed_tokens, min(num_new, step.budget))
            if not num_new:
                continue
            blocks = self.kv.allocate_slots(request, num_new)
            assert blocks == [], "a load comes with blocks for all tokens"
            self.loads.remove(request)
            self._start(request, num_new, blocks, step)
        return True

    def _schedule_waiting(self, step: Step) -> None:
        """Admit waiting requests in the policy's order until one does not fit; some may pass it."""
        behind_unfit = False
        while step.budget > 0 and self._has_slot(step):
            request = self.waiting.peek()
            if request is None or request in step.preempted:
                break
            if step.defers(request):
                if not self.waiting.defer(request.tenant):
                    break
                continue
            if step.sets_aside(request):
                step.num_set_aside += 1
                if step.num_set_aside >= MAX_SET_ASIDE:
                    break
                self.waiting.skip()
                continue
            may_pass = not behind_unfit or self.policy.may_pass(request, step.now)
            if may_pass and self.policy.may_admit(request, self.kv.num_free_blocks, step.now):
                if self._admit(request, step):
                    step.admitted(request)
                    continue
                if step.preempted:  # for this one, which still waits for their blocks
                    break
                behind_unfit |= not step.sets_aside(request)
            elif may_pass and self.policy.lets_pass:
                behind_unfit = True
            if behind_unfit and not self._may_skip(request, may_pass):
                break
            self.waiting.skip()
        self.waiting.resume()

    def _may_skip(self, request: Request, may_pass: bool) -> bool:
        """Whether to skip a request that does not fit, or that may not pass but was preempted."""
        if not self.policy.lets_pass or self.waiting.num_skipped >= MAX_SKIPPED:
            return False
        return may_pass or request.status is RequestStatus.PREEMPTED

    def _make_plan(self, step: Step) -> SchedulerOutput:
        """Make the plan of a step that is decided, and count its tokens as computed."""
        plan = step.to_output(self.kv, self._finished_req_ids, tells_tokens=self.steps.num_stages > 1)
        self._finished_req_ids = set()
        if self.kv.states is not None:
            plan.state_slots = self.kv.states.plan_step(plan.num_scheduled_tokens, self.requests)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self.requests[request_id].num_computed_tokens += num_tokens
        self._counts.step_tokens += plan.total_num_scheduled_tokens
        self.parts.fill(plan, self.requests, step.now)
        self.steps.begin(plan)
        self.loads.fill_in(plan, self.requests)
        return plan

    # ---- admission ----

    def _admit(self, request: Request, step: Step) -> bool:
        """Start the head of the queue if it fits, or load it first if another tier has more of its prefix."""
        if self._cannot_fit_yet(request, step.now) or self.steps.awaits_token(request):
            return False
        hit, num_hit_tokens = self.kv.get_computed_blocks(request)
        prefix = self.loads.find_loadable(request, num_hit_tokens)
        if prefix is not None:
            return self._start_load(request, prefix, num_hit_tokens, step)
        num_new = self._prefill_limit(request.num_tokens - num_hit_tokens)
        if num_new > step.budget and not self.config.enable_chunked_prefill:
            return False
        num_new = step.chunk(request, num_hit_tokens, min(num_new, step.budget), hit)
        if not num_new:
            return False
        num_reserved = (
            request.num_tokens if self.config.scheduler_reserve_full_isl else num_hit_tokens + num_new
        )
        if not self._make_fit(request, num_reserved, hit, step):
            return False
        blocks = self.kv.allocate_slots(request, num_new, hit)
        assert blocks is not None, "it was found to fit"
        self.waiting.take_slot(request)
        request.num_computed_tokens = num_hit_tokens
        self._start(request, num_new, blocks, step)
        self._record_admission(request, num_hit_tokens, step.now)
        return True

    def _cached_tokens(self, request: Request) -> tuple[int, int]:
        """For policies: how many tokens of a waiting request the device has cached, and how many more another
        tier has."""
        _, num_hit_tokens = self.kv.get_computed_blocks(request)
        prefix = self.loads.find_loadable(request, num_hit_tokens)
        return num_hit_tokens, 0 if prefix is None else prefix.num_tokens - num_hit_tokens

    def _cannot_fit_yet(self, request: Request, now: float) -> bool:
        """Whether the request surely does not fit yet, which spares the look-up of a long prompt."""
        if not self.running or not self.config.scheduler_reserve_full_isl:
            return False
        return self.slots.owes(request.tenant) is None and self.pins.cannot_make_fit(request, now)

    def _start_load(self, request: Request, prefix: LoadablePrefix, num_hit_tokens: int, step: Step) -> bool:
        """Admit and load the head of the queue if it fits whole, so no load waits for another's blocks."""
        if not self._make_fit(request, request.num_tokens, prefix.table, step):
            return False
        self.waiting.take_slot(request)
        self.loads.start(request, prefix, num_hit_tokens)
        self._record_admission(request, prefix.num_tokens, step.now)
        return True

    def _record_admission(self, request: Request, num_cached_tokens: int, now: float) -> None:
        """Hand pins over to a request with blocks, ``num_cached_tokens`` of which are cached or loading."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached_tokens
        self.pins.end_all(self.policy.on_admitted(request, now), PinEnd.HANDED_OVER, now)

    def _start(self, request: Request, num_new: int, blocks: list[KVCacheBlock], step: Step) -> None:
        """Let an admitted request join the batch."""
        if step.on_prefix_cache_hit is not None:
            step.on_prefix_cache_hit(request)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = step.now
            self._counts.look_up(request)
        (step.resumed if request.num_preemptions else step.new).append(request)
        step.commit(request, num_new, blocks)
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def _prefill_limit(self, num_tokens: int) -> int:
        """Cut a long prefill to what one step may compute of it."""
        threshold = self.config.long_prefill_token_threshold
        return min(num_tokens, threshold) if threshold else num_tokens

    # ---- blocks for a request ----

    def _make_fit(self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock], step: Step) -> bool:
        """Make a waiting request fit, if need be by revoking pins or preempting; returns whether it fits.

        Only requests of a tenant that has more slots are preempted.
        """
        if self.kv.fits(request, num_tokens, hit):
            return True
        if self._will_fit_after_inflight(request, num_tokens, hit):
            return False
        if self._revoke_pins_for(request, num_tokens, hit, step.now):
            return True
        if self._preempt_for(request, num_tokens, hit, step):
            return self.kv.are_cached(hit)  # else a victim was to compute some of it in this step
        self.kv.record_shortage(request, hit)
        return False

    def _will_fit_after_inflight(
        self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock]
    ) -> bool:
        """Whether it fits once steps under way return; a request that runs alone waits for them anyway."""
        return self.kv.has_deferred and (
            self._runs_alone(request) or self.kv.fits_after_deferred(request, num_tokens, hit)
        )

    def _revoke_pins_for(
        self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock], now: float
    ) -> bool:
        """Revoke pins until the request fits; any pin may be revoked if nothing else runs."""
        runs_alone = self._runs_alone(request)
        return self.pins.revoke_until_fits(request, num_tokens, hit, now, runs_alone=runs_alone)

    def _preempt_for(
        self, request: Request, num_tokens: int, hit: Sequence[KVCacheBlock], step: Step
    ) -> bool:
        """Preempt the tenant with most slots until this one fits; False if that does not suffice now."""
        victims = self._fairness.victims_for(request, num_tokens, hit, self.running, step)
        for victim in victims:
            self._preempt(victim, step, 0)
        return bool(victims) and self.kv.fits(request, num_tokens, hit)

    def _runs_alone(self, request: Request) -> bool:
        """Whether nothing runs, or only this request."""
        return not self.running or (len(self.running) == 1 and self.running[0] is request)

    def _preempt(self, victim: Request, step: Step, index: int) -> int:
        """Free a running request's blocks and queue it again, to be recomputed.

        Returns by how much the caller's ``index`` into the running requests moves: 1 if after the victim.
        """
        position = self.running.index(victim)
        del self.running[position]
        was_scheduled = step.withdraw(victim)
        self.parts.left(victim, Left.PREEMPTED, step.now)
        self.steps.defer_free(victim)
        self.loads.release(victim)
        self.kv.free(victim, victim.num_computed_tokens if was_scheduled else None)
        victim.num_computed_tokens = victim.num_external_computed_tokens = victim.num_disk_tokens = 0
        victim.num_preemptions += 1
        step.preempted.append(victim)
        self._counts.num_preemptions += 1
        self._queue_again(victim, step.now)
        return int(position < index)

    def _queue_again(self, request: Request, now: float) -> None:
        """Queue a request again that was admitted and has lost its blocks."""
        request.status = RequestStatus.PREEMPTED
        self.waiting.leave_slot(request)
        self.waiting.prepend(request, self.policy.waiting_key(request, now))

    # ---- slots in the batch ----

    @property
    def _num_slots(self) -> int:
        """Slots in the batch that are taken, those of requests that are being loaded included."""
        return len(self.running) + self.loads.num_requests

    def _has_slot(self, step: Step) -> bool:
        """Whether a slot is free, if need be by preempting the tenant with most for the next request."""
        if self._num_slots < self.config.max_num_seqs:
            return True
        request = self.waiting.peek() if self.waiting.is_contended else None
        if request is None or request in step.preempted:
            return False
        owed = self._fairness.owed_to(request, self.running, step)
        if owed:
            self._preempt(self.policy.victim(owed, request, step.now), step, 0)
        return bool(owed)

    # ---- outputs of steps ----

    def update_from_output(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float
    ) -> list[EngineCoreOutput]:
        """Append what a step sampled and end the requests that are done; returns the outputs for clients.

        A token of a request that has ended meanwhile is dropped.
        """
        requests = self.steps.end(plan, now)
        for unfit in self.loads.update_from_output(result):
            self.kv.free(unfit)
            self._queue_again(unfit, now)
        self.parts.take(plan, result, now)
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
            failure = result.failed.get(request_id)
            num_taken = append_tokens(request, token_ids, self.max_model_len, failure)
            if request.num_drafts_under_way:
                self.drafts.settle(request, len(token_ids), num_taken)
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
                describe_start(request, output)
            outputs.append(output)
        if any_finished:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        return outputs

    def update_draft_token_ids(self, proposals: Mapping[str, Sequence[int]], now: float) -> None:
        """Take drafts for the next step, by request id; what a request cannot use is dropped."""
        self.drafts.propose(proposals, self.requests)

    def sampled_grammars(self, plan: SchedulerOutput) -> dict[str, TokenGrammar]:
        """The grammars of the requests for which a plan under way samples a token, by request id."""
        return {
            request_id: request.grammar
            for request_id, request in self.constrained.items()
            if request.grammar is not None and self.steps.samples(plan, request)
        }

    def _finish(self, request: Request, token_ids: list[int], now: float) -> EngineCoreOutput:
        """End a request that has left its queue, as its status says: pin its blocks or free them."""
        request_id = request.request_id
        is_spoiled = request.stop_reason in KV_SPOILED
        self.parts.left(request, Left.SPOILED if is_spoiled else Left.ENDED, now)
        self.waiting.leave_slot(request)
        self.steps.leave(request)
        pin = None
        if request.status.complete:
            pin = self.pins.begin(request, now)
        else:
            self.policy.on_request_gone(request, now)
        output = last_output(request, token_ids)
        self.parts.fill_output(request, output, self.kv)
        self.loads.release(request)
        if is_spoiled:  # even blocks that others hold, too
            self.kv.evict(request)
            self.loads.evict(request)
        if request.keeps_tokens and request.status.complete:
            self.kv.note_turn(request)
        if pin is not None:
            self.pins.hold(request, pin, now)
        else:
            self.kv.free(request)
        del self.requests[request_id]
        if request.grammar is not None:
            del self.constrained[request_id]
        self._finished_req_ids.add(request_id)
        output.receipt = self.policy.take_receipt(request)
        output.kv_leased = self.leases.told(request, pin)
        if self._on_request_ended is not None:
            self._on_request_ended(request, now)
        self.pins.expire(now)
        return output

    # ---- between steps ----

    def expire(self, now: float) -> None:
        """End the pins that are past their deadline or that the policy has released."""
        self.pins.expire(now)

    def next_due_s(self) -> float | None:
        """When ``expire`` will next have something to do."""
        return self.pins.next_due_s()

    def reset_prefix_cache(self, now: float) -> bool:
        """End all pins and evict all cached blocks, on every tier.

        False, and nothing is changed, while requests or loads hold blocks.
        """
        done = self.kv.only_pins_hold and not self.loads.num_in_flight
        if done:
            self.pins.end_all(self.pins.all(), PinEnd.RELEASED, now)
            done = self.kv.reset_prefix_cache() and self.loads.reset_cache()
            assert done, "no request or load had blocks"
        return done

    def reset_encoder_cache(self, now: float) -> None:
        """Drop the encoder outputs that no request needs. Only a trace uses ``now``."""
        self.parts.drop_cached()

    def close(self, now: float) -> None:
        """End every pin and let the policy save what must survive: the engine stops."""
        self.pins.end_all(self.pins.all(), PinEnd.RELEASED, now)
        self.policy.close()

    # ---- reports ----

    def has_unfinished_requests(self) -> bool:
        """Whether any request has not ended, waiting or running."""
        return bool(self.requests)

    @property
    def num_pending_loads(self) -> int:
        """Loads that the worker has yet to report, in answer to an empty plan if need be."""
        return self.loads.num_in_flight

    @property
    def awaits_worker(self) -> bool:
        """Whether the worker has something to report, in answer to an empty plan if need be."""
        return bool(self.loads.num_in_flight or self.loads.num_disk_writes or self.leases)

    def make_stats(self) -> SchedulerStats:
        """Gauges as they are now, and counts since the last call."""
        counts = self._counts
        self._counts = StepCounts()
        return stats_of(self, counts)

    def statistics(self) -> SchedulerStatistics:
        """How many requests, blocks and pins there are now."""
        return statistics_of(self)

    def check_invariants(self) -> None:
        """Raise AssertionError unless queues, requests, pins and blocks agree with each other."""
        check_invariants_of(self)

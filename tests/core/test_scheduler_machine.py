"""For any sequence of events, a scheduler with pins and host tier leaks, loses and confuses nothing, and
always makes progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, cycle
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from continuum.jobs.prewarming import LAST_OF_ALL
from engine.core.offload.disk_tier import DiskLevel
from engine.core.policy import Pin, PinEnd, PolicyContext, PriorityPolicy, SchedulingPolicy
from engine.core.request import KnownPrefix, Request, RequestStatus
from engine.core.scheduler_report import PauseState
from engine.core_process.kept_turns import KeptTurns
from engine.records.kv_cache_groups import KVCacheGroup
from engine.records.messages import (
    JobFinished,
    JobRef,
    ToolCall,
    ToolGapStarted,
    ToolSignal,
    ToolState,
    TurnPrefix,
)
from eval.baselines.catalog import parse_policy
from eval.baselines.gate import GatePolicy
from tests.core.engine_room import CountingGrammar, EngineRoom, token_at
from tests.core.worker_pictures import pictures_of
from tests.eval.baselines.policy_room import PlainKnowledge
from tracing.tracer import Tracer

BLOCK_SIZE, NUM_BLOCKS, MAX_LEN = 4, 17, 64
FULL = KVCacheGroup((0,))


def within(window: int) -> KVCacheGroup:
    return KVCacheGroup((0,), sliding_window=window)


def by_chunks(chunk: int) -> KVCacheGroup:
    return KVCacheGroup((0,), attention_chunk=chunk)


LOCAL = [
    (FULL, within(5)),
    (FULL, within(8), within(8)),
    (FULL, FULL, within(1)),
    (within(6),),
    (FULL, within(4), within(13)),
    (within(3), within(9)),
    (FULL, by_chunks(8)),
    (FULL, by_chunks(12), by_chunks(12)),
    (FULL, FULL, by_chunks(10)),
    (by_chunks(16),),
    (FULL, within(6), by_chunks(24)),
    (by_chunks(8), by_chunks(7)),
]
"""Groups of models with sliding windows or chunks."""
DISKS = [
    DiskLevel(num_blocks=40, max_writes=20),
    DiskLevel(num_blocks=5, max_writes=2, fixed_tokens=3.0, read_share=0.4),
]
STATES = KVCacheGroup((0,), state_blocks=3)
DRAFT_FATES: list[list[tuple[int, int]]] = [
    [],
    [(2, 1)],
    [(9, 0)],
    [(0, 3), (5, 2), (0, 0)],
    [(1, 0), (0, 0), (3, 9), (0, 1), (4, 0)],
]
"""The right drafts of each proposal, and the wrong ones that follow; no drafts in the first case."""
SAID = st.builds(
    JobRef,
    st.sampled_from(["named", "named", None]),
    st.booleans(),
    tenant=st.sampled_from([None, None, "t", "u"]),
    owner=st.sampled_from([None, None, "o", "p"]),
    num_replies=st.sampled_from([None, None, 0, 1, 2]),
    num_results=st.sampled_from([None, 0, 1]),
    deadline_s=st.sampled_from([None, None, 0.5, 3.0]),
    prewarms=st.sampled_from([False, False, False, True]),
)
"""What a client says about a turn's job."""
MAX_WAIT_S = 1.0
POLICIES = (
    f"continuum:max_wait_s={MAX_WAIT_S}",
    f"continuum:ttl_rule=fixed,max_wait_s={MAX_WAIT_S},max_return_wait_s={MAX_WAIT_S / 2}",
    f"continuum:ttl_rule=fork,max_wait_s={MAX_WAIT_S}",
    f"continuum:ttl_rule=paper,max_wait_s={MAX_WAIT_S}",
    "fcfs",
    "priority",
    "program-fcfs",
    "fixed-ttl:1000",
    "fork",
    *("plas", "hrrn", "wspt", "gittins", "tlru:4", "pause", "idleness"),
    "gate",
    "paper",
    "infercept",
    "oracle",
)
BOUNDED_BY_HALF_AN_HOUR = ("gate", "pause", "idleness")
"""These policies let a new job wait for up to half an hour."""


class ChaosPolicy(PriorityPolicy):
    """Pins, breaks, refuses and expires at random, drawn from a stream of bits: the worst possible policy."""

    lets_pass = True

    def __init__(self, bits: list[bool]) -> None:
        self._bits = iter(bits)
        self._ids = count()
        self._pins: dict[int, Pin] = {}

    def _coin(self) -> bool:
        return next(self._bits, False)

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        return not self._coin()

    def may_pass(self, request: Request, now: float) -> bool:
        return self._coin()

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        hashes = request.block_hashes[: request.num_computed_tokens // BLOCK_SIZE]
        if not hashes or self._coin():
            return None
        pin = Pin(next(self._ids), "job", request.request_id, hashes, now + 1)
        self._pins[pin.pin_id] = pin
        return pin

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        return [
            p for p in list(self._pins.values()) if p.block_hashes[0] in request.block_hashes and self._coin()
        ]

    def revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        for pin in self._pins.values():
            if last_resort or self._coin():
                yield pin

    def due(self, now: float) -> Iterator[tuple[Pin, PinEnd]]:
        for pin in list(self._pins.values()):
            if pin.deadline_s <= now and self._coin():
                yield pin, PinEnd.EXPIRED

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        del self._pins[pin.pin_id]

    def on_pin_shrunk(
        self, pin: Pin, num_blocks_lost: int, cause: PinEnd, now: float, by: str | None = None
    ) -> None:
        assert pin is self._pins[pin.pin_id]

    def pins(self) -> Iterable[Pin]:
        return list(self._pins.values())


def make_policy(name: str, bits: list[bool], context: PolicyContext) -> SchedulingPolicy:
    if name == "chaos":
        return ChaosPolicy(bits)
    if name == "gate":
        return GatePolicy(context, share=0.5, forced_after_s=1.0)
    return parse_policy(name).make(context, PlainKnowledge(reload_s_per_token=0.01))


@dataclass(slots=True)
class Awaited:
    """A request and its expected output, which does not depend on how its steps are planned."""

    request: Request
    num_tokens: int
    """Tokens until it ends, unless ended earlier."""
    ended_early: bool = False
    is_continued: bool = False
    """Whether another request continues its tokens."""

    def check(self, received: list[int], finished: bool) -> None:
        """Checks that exactly its output was received, up to its end."""
        request = self.request
        places = range(request.num_prompt_tokens, request.num_prompt_tokens + len(received))
        assert received == [token_at(request.request_id, place) for place in places]
        assert self.is_continued or received == request.output_token_ids
        assert len(received) <= self.num_tokens
        assert not finished or self.ended_early or len(received) == self.num_tokens


ADAPTERS = (None, None, "x@0", None, "y@0", None, None, "z@0")


class SchedulerMachine(RuleBasedStateMachine):
    """Jobs with turns, retries and branches, aborted, broken, paused and preempted in any order, with or
    without a step under way."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = count()
        self.tracer = Tracer()
        self.added: dict[str, Awaited] = {}
        self.jobs: dict[str, list[list[int]]] = {}
        self.named: dict[str, JobRef] = {}
        """What the client said of each turn whose job it named."""
        self.kept_turns = KeptTurns(250, BLOCK_SIZE)

    @initialize(
        policy=st.sampled_from(["chaos", "chaos", *POLICIES]),
        bits=st.lists(st.booleans(), min_size=0, max_size=60),
        reserve=st.booleans(),
        threshold=st.sampled_from([0, 0, 5]),
        caching=st.sampled_from([True, True, True, False]),
        num_host_blocks=st.sampled_from([60, 24, 6, 1, 0]),
        load_fates=st.lists(
            st.tuples(st.sampled_from([3, 0, 1, 8]), st.sampled_from([True, True, False])), min_size=1
        ),
        async_scheduling=st.booleans(),
        num_stages=st.sampled_from([1, 1, 1, 2, 3, 4]),
        groups=st.sampled_from([(FULL,), (FULL,), *LOCAL]),
        disk=st.sampled_from([None, None, *DISKS]),
        num_states=st.sampled_from([0, 0, 0, 4, 6, 30]),
        draft_fates=st.sampled_from(DRAFT_FATES),
        encoder=st.sampled_from([(), (9, 9), (9, 9, True), (12, 9), (40, 12, True), (40, 12), (12, 40)]),
    )
    def start(
        self,
        policy: str,
        bits: list[bool],
        reserve: bool,
        threshold: int,
        caching: bool,
        num_host_blocks: int,
        load_fates: list[tuple[int, bool]],
        async_scheduling: bool,
        num_stages: int,
        groups: tuple[KVCacheGroup, ...],
        disk: DiskLevel | None,
        num_states: int,
        draft_fates: list[tuple[int, int]],
        encoder: tuple[int, int, bool],
    ) -> None:
        if num_stages > 1:
            num_states, draft_fates = 0, []
        fates, drafts = cycle(load_fates), cycle(draft_fates)
        num_host_blocks = num_host_blocks if caching else 0
        self.num_blocks = NUM_BLOCKS if groups == (FULL,) else 1 + 16 * len(groups)
        groups = (*groups, STATES) if num_states else groups
        tiers = {"num_host_blocks": num_host_blocks, "num_states": max(0, num_states - 1)}
        context = PolicyContext(BLOCK_SIZE, self.num_blocks - 1, self.tracer, kv_cache_groups=groups, **tiers)
        self.room = EngineRoom(
            make_policy(policy, bits, context),
            block_size=BLOCK_SIZE,
            num_blocks=self.num_blocks,
            max_model_len=MAX_LEN,
            enable_prefix_caching=caching,
            tracer=self.tracer,
            kv_cache_groups=groups,
            num_states=num_states,
            num_host_blocks=num_host_blocks,
            load_fate=lambda: next(fates),
            disk_level=disk,
            write_fate=lambda: next(fates),
            async_scheduling=async_scheduling,
            num_stages=num_stages,
            scheduler_reserve_full_isl=reserve,
            long_prefill_token_threshold=threshold,
            max_loras=1 + len(bits) % 3,
            on_request_ended=self.kept_turns.request_ended,
        )
        if encoder:
            self.room.read_pictures(*encoder)
        self.room.draft_fate = (lambda: next(drafts)) if draft_fates else None
        self.policy = policy
        self.on_start(policy, bits)

    def on_start(self, policy: str, bits: list[bool]) -> None:
        """A hook for subclasses."""

    def _add(
        self,
        prompt: list[int],
        job: str | None,
        said: JobRef,
        before: KnownPrefix | None = None,
        **options: Any,
    ) -> None:
        """``job`` None: no job; ``said``: the client's JobRef, perhaps without a name."""
        request_id = f"r{next(self.ids)}"
        prompt = prompt[: MAX_LEN - 8]
        whole = prompt if before is None else [*before.token_ids, *prompt]
        options["adapter"] = ADAPTERS[len(whole) % len(ADAPTERS)]
        options["media"] = pictures_of(whole) if self.room.pictures else ()
        request = self.room.add(
            request_id, prompt, job=None if job is None else said, before=before, **options
        )
        assert request.prompt_token_ids == whole
        stops_after = options.get("stops_after")
        ends = [
            request.max_tokens,
            MAX_LEN - len(whole),
            *([] if stops_after is None else [stops_after + 1]),
        ]
        self.added[request_id] = Awaited(request, min(ends))
        if job is not None:
            self.jobs.setdefault(job, []).append(self.room.tokens[request_id])
            if said.job_id is not None:
                self.named[request_id] = replace(said, num_replies=None, is_last_step=False)
        for useless in list(self.room.scheduler.policy.made_useless(request)):
            self._end(useless, stopped=False)

    @rule(
        length=st.integers(1, 40),
        start=st.integers(0, 3),
        job=st.sampled_from([None, "a", "b", "c"]),
        said=SAID,
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 2),
        awaits_grammar=st.sampled_from([False, False, True]),
        stops_after=st.sampled_from([None, 0, 1, 5]),
    )
    def new_turn(
        self,
        length: int,
        start: int,
        job: str | None,
        said: JobRef,
        max_tokens: int,
        priority: int,
        awaits_grammar: bool,
        stops_after: int | None,
    ) -> None:
        """Adds a first turn; prompts share prefixes."""
        prompt = [start] * 8 + list(range(length))
        said = replace(said, job_id=job if said.job_id else None, is_last_step=False)
        self._add(
            prompt,
            job,
            said,
            max_tokens=max_tokens,
            priority=priority,
            awaits_grammar=awaits_grammar,
            stops_after=stops_after,
        )

    @precondition(lambda self: self.jobs)
    @rule(
        data=st.data(),
        more=st.integers(0, 10),
        said=SAID,
        is_changed=st.booleans(),
        awaits_grammar=st.sampled_from([False, False, True]),
    )
    def next_turn(
        self, data: st.DataObject, more: int, said: JobRef, is_changed: bool, awaits_grammar: bool
    ) -> None:
        """Continues any earlier turn of a job from any point: a return, a branch, a retry or an overlap; one
        token may differ."""
        job = data.draw(st.sampled_from(sorted(self.jobs)))
        history = data.draw(st.sampled_from(self.jobs[job]))
        prompt = list(history) + list(range(more))
        if is_changed:
            prompt[data.draw(st.integers(0, len(prompt) - 1))] = 7
        said = replace(said, job_id=job if said.job_id else None)
        self._add(prompt, job, said, max_tokens=6, awaits_grammar=awaits_grammar)

    @precondition(lambda self: self.named and self.room.finished)
    @rule(data=st.data(), more=st.integers(4, 24), goes_on=st.booleans())
    def result_comes_early(self, data: st.DataObject, more: int, goes_on: bool) -> None:
        """Computes what is known of the turn that follows one that has ended; that turn may come at once."""
        over = sorted(self.named.keys() & self.room.finished.keys())
        if not over:
            return
        before = data.draw(st.sampled_from(over))
        said = self.named[before]
        prompt = self.room.tokens[before] + list(range(more))
        self._add(prompt, said.job_id, replace(said, prewarms=True), max_tokens=1)
        if goes_on:
            self._add([*prompt, 1, 2], said.job_id, replace(said, prewarms=False), max_tokens=2)

    @precondition(lambda self: len(self.kept_turns) > 0)
    @rule(
        data=st.data(),
        more=st.integers(1, 8),
        cut=st.sampled_from([0, 0, 1, 3]),
        said=SAID,
        job=st.sampled_from([None, "a", "b"]),
    )
    def next_turn_in_part(
        self, data: st.DataObject, more: int, cut: int, said: JobRef, job: str | None
    ) -> None:
        """Continues an ended turn by its id, from its end or before, if it is still known."""
        turn_id = data.draw(st.sampled_from(sorted(self.room.finished)))
        num_tokens = len(self.room.tokens[turn_id]) - cut
        if not 0 < num_tokens < MAX_LEN - 16:
            return
        before = self.kept_turns.take(TurnPrefix(turn_id, num_tokens))
        if before is not None:
            self.added[turn_id].is_continued = True
            said = replace(said, job_id=job if said.job_id else None)
            self._add(list(range(more)), job, said, before, max_tokens=6)

    @precondition(lambda self: self.room.scheduler.compiling)
    @rule(
        data=st.data(),
        num_tokens=st.integers(1, 6),
        refused_after=st.sampled_from([None, None, 0, 2]),
    )
    def grammar_compiled(self, data: st.DataObject, num_tokens: int, refused_after: int | None) -> None:
        scheduler = self.room.scheduler
        request = scheduler.compiling[data.draw(st.sampled_from(sorted(scheduler.compiling)))]
        self._compile(request, CountingGrammar(num_tokens, refused_after))

    def _compile(self, request: Request, grammar: CountingGrammar) -> None:
        self.room.scheduler.grammar_compiled(request, grammar, self.room.clock.now())
        awaited = self.added[request.request_id]
        awaited.num_tokens = min(awaited.num_tokens, grammar.max_tokens)

    @rule(seconds=st.sampled_from([0.01, 0.5, 3.0, 20.0]), times=st.sampled_from([1, 2, 8, 30]))
    def step(self, seconds: float, times: int) -> None:
        """Runs enough steps that turns end and return while others are under way."""
        for _ in range(times):
            queued = list(self.room.scheduler.waiting)
            now = self.room.clock.now()
            while self.room.plans_on:
                self.room.plan_next()
                self.room.check_invariants()
            self.room.take_output(seconds)
            self.room.check_invariants()
            if self.policy.startswith("continuum"):
                self._check_that_waiting_is_bounded(queued, now)

    def _check_that_waiting_is_bounded(self, queued: list[Request], now: float) -> None:
        """Checks that no later request of the tenant passes one that has waited ``max_wait_s``. Other tenants
        have separate shares; a request without an adapter does not wait for an adapter slot."""
        still_there = {request.request_id for request in self.room.scheduler.waiting}
        started = [request for request in queued if request.request_id not in still_there]
        for request in queued:
            is_bounded = request.priority < LAST_OF_ALL
            if is_bounded and request.request_id in still_there and now - request.arrival_time >= MAX_WAIT_S:
                same = [other for other in started if other.tenant == request.tenant]
                own = [other for other in same if other.adapter or not request.adapter]
                assert all(other.arrival_time <= request.arrival_time for other in own)

    @precondition(lambda self: self.room.can_plan)
    @rule()
    def plan(self) -> None:
        """Plans a step, so that the next rule runs with a step under way."""
        self.room.plan_next()

    @precondition(lambda self: self.room.under_way)
    @rule()
    def output(self) -> None:
        self.room.take_output()

    @rule(
        data=st.data(),
        num_right=st.integers(0, 6),
        num_wrong=st.integers(0, 6),
    )
    def drafts_come(self, data: st.DataObject, num_right: int, num_wrong: int) -> None:
        """Drafts arrive at any moment for any requests, even for those that must have none."""
        asked = data.draw(st.lists(st.sampled_from(sorted(self.added)))) if self.added else []
        requests = [self.added[request_id].request for request_id in asked]
        drafts = {r.request_id: self.room.drafts_of(r, num_right, num_wrong) for r in requests}
        self.room.scheduler.update_draft_token_ids(drafts | {"never seen": [1]}, self.room.clock.now())

    @rule(seconds=st.sampled_from([0.1, 1.0, 15.0, 700.0]))
    def time_passes(self, seconds: float) -> None:
        self.room.clock.advance(seconds)
        self.room.scheduler.expire(self.room.clock.now())

    @precondition(lambda self: self.room.scheduler.requests)
    @rule(data=st.data(), stopped=st.booleans())
    def end_early(self, data: st.DataObject, stopped: bool) -> None:
        self._end(data.draw(st.sampled_from(sorted(self.room.scheduler.requests))), stopped=stopped)

    def _end(self, request_id: str, *, stopped: bool) -> None:
        status = RequestStatus.FINISHED_STOPPED if stopped else RequestStatus.FINISHED_ABORTED
        now = self.room.clock.now()
        outputs = self.room.scheduler.finish_requests([request_id, "never seen"], status, now)
        assert [output.request_id for output in outputs] == [request_id]
        self.added[request_id].ended_early = True
        self.room.finished[request_id] = outputs[0]

    @rule(data=st.data(), command=st.sampled_from(["pytest -q", "cd x && ls", ""]))
    def tools_start(self, data: st.DataObject, command: str) -> None:
        if self.added:
            request_id = data.draw(st.sampled_from(sorted(self.added)))
            calls = [ToolCall("bash", f'{{"command": "{command}"}}')] if command else []
            self.room.scheduler.signal(ToolGapStarted(request_id, calls), self.room.clock.now())

    @rule(
        job=st.sampled_from(["a", "b", "never seen"]),
        state=st.sampled_from(ToolState),
        call_id=st.sampled_from([None, "1", "2"]),
        remaining_s=st.sampled_from([None, 0.0, 2.0, 500.0]),
        tool=st.sampled_from([None, "search"]),
    )
    def client_tells(
        self, job: str, state: ToolState, call_id: str | None, remaining_s: float | None, tool: str | None
    ) -> None:
        signal = ToolSignal(job, state, call_id=call_id, remaining_s=remaining_s, tool=tool)
        self.room.scheduler.signal(signal, self.room.clock.now())

    @rule(limit=st.integers(1, 4))
    def somebody_asks(self, limit: int) -> None:
        """Every listed job is found by its name, and a branch has a deadline exactly if it has pinned
        blocks."""
        now = self.room.clock.now()
        policy = self.room.scheduler.policy
        assert len(policy.jobs(limit, now)) <= limit
        for job in policy.jobs(1000, now):
            found = policy.job(job.id, now)
            assert found is not None
            assert found == job
            assert all((each.ttl_s is None) is (each.pinned_blocks == 0) for each in job.branches)

    @rule(job=st.sampled_from(["a", "b", "never seen"]))
    def finish_job(self, job: str) -> None:
        self.room.scheduler.signal(JobFinished(job), self.room.clock.now())

    @precondition(lambda self: self.room.scheduler.pause_state is PauseState.UNPAUSED)
    @rule(state=st.sampled_from([PauseState.PAUSED_NEW, PauseState.PAUSED_ALL]))
    def pause(self, state: PauseState) -> None:
        self.room.scheduler.set_pause_state(state, self.room.clock.now())

    @precondition(lambda self: self.room.scheduler.pause_state is not PauseState.UNPAUSED)
    @rule()
    def resume(self) -> None:
        self.room.scheduler.set_pause_state(PauseState.UNPAUSED, self.room.clock.now())

    @precondition(lambda self: self.room.finished)
    @rule()
    def reset_prefix_cache(self) -> None:
        scheduler = self.room.scheduler
        busy = bool(scheduler.running or scheduler.loads.num_requests or scheduler.num_pending_loads)
        assert scheduler.reset_prefix_cache(self.room.clock.now()) is not busy
        assert busy or scheduler.statistics().num_pins == 0
        assert busy or not scheduler.statistics().num_used_host_blocks

    @invariant()
    def all_is_accounted_for(self) -> None:
        if hasattr(self, "room"):
            self.room.check_invariants()
            assert set(self.room.scheduler.requests) | set(self.room.finished) == set(self.added)
            assert not set(self.room.scheduler.requests) & set(self.room.finished)
            for request_id, awaited in self.added.items():
                awaited.check(self.room.received[request_id], request_id in self.room.finished)

    def teardown(self) -> None:
        """From any state the engine finishes all requests, and once pins expire every block is free."""
        if not hasattr(self, "room"):
            return
        room = self.room
        room.scheduler.set_pause_state(PauseState.UNPAUSED, room.clock.now())
        for request in list(room.scheduler.compiling.values()):
            self._compile(request, CountingGrammar(2))
        if room.scheduler.policy.name in BOUNDED_BY_HALF_AN_HOUR:
            room.clock.advance(1800)
        room.run()
        self.all_is_accounted_for()
        assert set(room.finished) == set(self.added)
        room.check_invariants()
        assert room.scheduler.reset_prefix_cache(room.clock.now())
        assert room.scheduler.kv.num_free_blocks == self.num_blocks - 1
        if (states := room.scheduler.kv.states) is not None:
            assert states.pool.num_free_blocks == states.pool.num_usable_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)

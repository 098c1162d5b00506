"""A scheduler with a fake model, which the core's tests drive step by step."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from engine.clock import ManualClock
from engine.config.engine_config import SchedulerConfig
from engine.core.encoder_cache_manager import EncoderCacheManager
from engine.core.offload.disk_tier import DiskLevel
from engine.core.offload.offloading_connector import OffloadingConnector
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.policy import FcfsPolicy, SchedulingPolicy
from engine.core.request import KnownPrefix, Request
from engine.core.scheduler import Scheduler
from engine.core.traced_scheduler import TracedScheduler
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from engine.records.messages import EngineCoreOutput, JobRef, MediaSpan
from engine.records.row_failures import NOT_NUMBERS
from engine.records.sampling_params import SamplingParams
from engine.records.structured_outputs import StructuredOutputsParams
from tests.core.kv_memory import KvMemory, LoadFate, Work, at_once
from tests.core.worker_pictures import WorkerPictures
from tests.core.worker_rows import WorkerRows
from tracing.events import TraceHeader
from tracing.tracer import Tracer


class CountingGrammar:
    """Allows ``num_tokens`` tokens; refuses the one after the first ``refused_after``."""

    def __init__(self, num_tokens: int, refused_after: int | None = None) -> None:
        self._num_tokens = num_tokens
        self._refused_after = refused_after
        self.num_accepted = 0

    def accept(self, token_id: int) -> bool:
        assert not self.complete, "a token came after the end"
        if self.num_accepted == self._refused_after:
            return False
        self.num_accepted += 1
        return True

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        most = self._num_tokens if self._refused_after is None else self._refused_after
        return max(0, min(len(token_ids), most - self.num_accepted))

    def forced(self, most: int) -> Sequence[int]:
        return ()

    @property
    def complete(self) -> bool:
        return self.num_accepted >= self._num_tokens

    @property
    def max_tokens(self) -> int:
        """The number of tokens after which a request has ended."""
        refused = self._num_tokens if self._refused_after is None else self._refused_after + 1
        return min(self._num_tokens, refused)


def token_at(request_id: str, position: int) -> int:
    """The token sampled at this position, which counts prompt and output."""
    return crc32(f"{request_id}:{position}".encode()) >> 1  # As large as a token id may be.


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A plan that was taken and has not run; the positions of its sampled tokens by request."""

    work: Work
    sampled: dict[str, range]


DraftFate = Callable[[], tuple[int, int]]
"""Returns for the next proposal how many right drafts come first, and how many wrong ones follow."""
WRONG = 5
"""A draft that is never sampled."""


class EngineRoom:
    """Steps a real scheduler; sampled tokens are a function of request id and position. With
    ``async_scheduling`` a plan runs only once the next one is made; with ``num_stages``, that many are in
    flight."""

    draft_fate: DraftFate | None = None
    """The drafts proposed after each output; set before the first step."""
    pictures: WorkerPictures | None = None
    """The encoder outputs of a model that reads pictures; see ``read_pictures``."""
    _awaits_output = False
    """Whether drafts are likely after the step under way, as the core tracks it."""

    def __init__(
        self,
        policy: SchedulingPolicy | None = None,
        *,
        block_size: int = 4,
        num_blocks: int = 17,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        tracer: Tracer | None = None,
        num_host_blocks: int = 0,
        min_load_tokens: int = 1,
        load_fate: LoadFate = at_once,
        disk_level: DiskLevel | None = None,
        write_fate: LoadFate = at_once,
        on_request_ended: Callable[[Request, float], None] | None = None,
        async_scheduling: bool = False,
        kv_cache_groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP,
        num_states: int = 0,
        num_stages: int = 1,
        **limits: int | bool,
    ) -> None:
        limits["async_scheduling"] = async_scheduling or num_stages > 1
        config: dict[str, int | bool] = {"max_num_seqs": 4, "max_num_batched_tokens": 32} | limits
        self.clock = ManualClock()
        self.connector = (
            OffloadingConnector(num_host_blocks, block_size, min_load_tokens, disk_level)
            if num_host_blocks
            else None
        )
        self.memory = KvMemory(block_size, load_fate, write_fate, kv_cache_groups, num_blocks)
        self._tracer = tracer or Tracer()
        self._untraced = Scheduler(
            SchedulerConfig(**config),  # type: ignore[arg-type]
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            policy=policy or FcfsPolicy(),
            enable_prefix_caching=enable_prefix_caching,
            kv_connector=self.connector,
            kv_cache_groups=kv_cache_groups,
            num_states=num_states,
            num_stages=num_stages,
            on_request_ended=on_request_ended,
        )
        self._traced = TracedScheduler(self._untraced, self._tracer)
        self.tokens: dict[str, list[int]] = {}
        """All tokens of every request that was added, prompt and output."""
        self.received: dict[str, list[int]] = defaultdict(list)
        """Output tokens that the client of each request received."""
        self.under_way: deque[_UnderWay] = deque()
        self._max_under_way = max(1 + async_scheduling, num_stages)
        self.rows = WorkerRows(token_at, num_stages)
        self.finished: dict[str, EngineCoreOutput] = {}
        self.failing: set[str] = set()
        """Requests whose next logits are not numbers."""
        self.last_plan: SchedulerOutput | None = None

    def read_pictures(self, cache_size: int, step_size: int, whole: bool = False) -> None:
        """Makes the model read pictures; call before the first step."""
        encoder = EncoderCacheManager(cache_size, step_size, keeps_whole=whole)
        self._untraced.add_parts(encoder)
        self.pictures = WorkerPictures(encoder)
        self.pictures.may_not_cut = whole and self._untraced.kv.states is None

    @property
    def scheduler(self) -> Scheduler | TracedScheduler:
        """The scheduler with or without its trace wrapper, chosen as in ``EngineCore``."""
        return self._traced if self._tracer.on else self._untraced

    def begin_trace(self, *, from_start: bool) -> TraceHeader:
        return self._traced.begin_trace(0.0, self.clock.now(), from_start=from_start)

    def add(
        self,
        request_id: str,
        prompt: list[int],
        *,
        max_tokens: int = 4,
        priority: int = 0,
        job_id: str | None = None,
        is_last_step: bool = False,
        tenant: str | None = None,
        job: JobRef | None = None,
        cache_salt: str | None = None,
        awaits_grammar: bool = False,
        stops_after: int | None = None,
        adapter: str | None = None,
        media: Sequence[MediaSpan] = (),
        before: KnownPrefix | None = None,
    ) -> Request:
        """``job``: the client's complete JobRef; else ``job_id`` names one, or there is none. A stop token
        comes after ``stops_after`` tokens. ``before``: the known tokens before the prompt."""
        num_prompt_tokens = len(prompt) + (0 if before is None else len(before.token_ids))
        if job is None and job_id is not None:
            job = JobRef(job_id, is_last_step, tenant)
        wanted = StructuredOutputsParams(json_object=True) if awaits_grammar else None
        request = Request(
            request_id,
            prompt,
            SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                structured_outputs=wanted,
                stop_token_ids=[]
                if stops_after is None
                else [token_at(request_id, num_prompt_tokens + stops_after)],
            ),
            self.clock.now(),
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            media=media,
            job=job,
            block_hasher=self.scheduler.request_block_hasher,
            before=before,
            keeps_tokens=True,
        )
        self.tokens[request_id] = request.all_token_ids
        self.scheduler.add_request(request, self.clock.now())
        return request

    def step(self, seconds: float = 0.01) -> SchedulerOutput:
        """Plans as far as possible, advances the clock and takes the oldest output. Returns the last plan
        made."""
        while self.plans_on:
            self.plan_next()
        self.take_output(seconds)
        assert self.last_plan is not None
        return self.last_plan

    @property
    def can_plan(self) -> bool:
        """Whether another plan may be made before an output is taken."""
        return len(self.under_way) < self._max_under_way

    @property
    def plans_on(self) -> bool:
        """Whether the core would make another plan now."""
        return self.can_plan and not (self.under_way and self._awaits_output)

    def plan_next(self) -> SchedulerOutput:
        plan = self.last_plan = self.scheduler.schedule(self.clock.now())
        work = self.memory.take(plan, self.scheduler.requests, [each.work for each in self.under_way])
        self._check_drafts(plan)
        if self.pictures is not None:
            self.pictures.take(work)
        self.under_way.append(_UnderWay(work, self.rows.sampled(work)))
        return plan

    def _check_drafts(self, plan: SchedulerOutput) -> None:
        """Checks that drafts follow known tokens only, within the request's remaining length."""
        for request_id, drafts in plan.scheduled_spec_decode_tokens.items():
            request = self.scheduler.requests[request_id]
            assert 0 < len(drafts) < plan.num_scheduled_tokens[request_id]
            assert request.num_computed_tokens == request.num_tokens + len(drafts)
            assert request.num_output_tokens + len(drafts) < request.max_tokens
        assert plan.total_num_scheduled_tokens <= self.scheduler.config.max_num_batched_tokens

    def take_output(self, seconds: float = 0.01) -> None:
        """Runs the oldest plan and reports its output to the scheduler."""
        running = self.under_way.popleft()
        num_accepted = {request_id: len(places) - 1 for request_id, places in running.sampled.items()}
        reports = self.memory.execute(running.work, num_accepted)
        self.clock.advance(seconds)
        result = ModelRunnerOutput(
            list(running.sampled),
            [[token_at(i, position) for position in places] for i, places in running.sampled.items()],
            finished_loads=reports.finished_loads,
            failed_loads=reports.failed_loads,
            finished_disk_writes=reports.finished_disk_writes,
            failed_disk_writes=reports.failed_disk_writes,
            failed=dict.fromkeys(self.failing & running.sampled.keys(), NOT_NUMBERS),
        )
        for output in self.scheduler.update_from_output(running.work.plan, result, self.clock.now()):
            self.received[output.request_id] += output.new_token_ids
            if output.finished:
                assert output.request_id not in self.finished, "a request ended twice"
                self.finished[output.request_id] = output
        if self.draft_fate is not None:
            self._propose(self.draft_fate)

    def _propose(self, fate: DraftFate) -> None:
        """Proposes drafts after an output, as the core does: none while sampled tokens are unknown."""
        drafts = {request.request_id: self.drafts_of(request, *fate()) for request in self.scheduler.running}
        drafts = {request_id: tokens for request_id, tokens in drafts.items() if tokens}
        self._awaits_output = bool(drafts)
        if drafts and not self.under_way:
            self.scheduler.update_draft_token_ids(drafts, self.clock.now())

    @staticmethod
    def drafts_of(request: Request, num_right: int, num_wrong: int) -> list[int]:
        """``num_right`` drafts that will be sampled, then ``num_wrong`` others, up to what its grammar
        allows."""
        start = request.num_tokens
        drafts = [token_at(request.request_id, start + i) for i in range(num_right)] + [WRONG] * num_wrong
        return drafts if request.grammar is None else drafts[: request.grammar.count_allowed(drafts)]

    def check_invariants(self) -> None:
        """Checks the scheduler's invariants, and that blocks and slots hold what they are found for."""
        self.scheduler.check_invariants()
        cached = {b.block_id: b.block_hash for b in self.scheduler.kv.pool.blocks if b.block_hash is not None}
        connector = self.connector
        in_memory = connector.tier.contents() if connector else {}
        on_disk = connector.disk.tier.contents() if connector and connector.disk else {}
        memory = self.memory.after([each.work for each in self.under_way])
        memory.check_claims(cached, in_memory, on_disk)
        if (states := self.scheduler.kv.states) is not None:
            memory.check_states({s.block_id: s.block_hash for s in states.pool.blocks if s.block_hash})

    def run(self, max_steps: int = 1000) -> None:
        """Steps until nothing is left; fails if the engine makes no progress."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self.scheduler.num_pending_loads:
                while self.under_way:
                    self.take_output()
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.statistics()}")

"""A scheduler with a made-up model: what the core's tests drive by hand."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from engine.clock import ManualClock
from engine.config import SchedulerConfig
from engine.core.disk_tier import DiskLevel
from engine.core.offloading_connector import OffloadingConnector
from engine.core.scheduler import Scheduler
from engine.messages import EngineCoreOutput, JobRef
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.policy import FcfsPolicy, SchedulingPolicy
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.structured_output.params import StructuredOutputsParams
from tests.core.kv_memory import KvMemory, LoadFate, at_once
from tracing.tracer import Tracer


class CountingGrammar:
    """Allows so many tokens and no more; the one after ``refused_after`` of them it does not."""

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

    @property
    def complete(self) -> bool:
        return self.num_accepted >= self._num_tokens


class EngineRoom:
    """Steps a real scheduler; sampled tokens are a function of request id and position."""

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
        **limits: int | bool,
    ) -> None:
        config: dict[str, int | bool] = {"max_num_seqs": 4, "max_num_batched_tokens": 32} | limits
        self.clock = ManualClock()
        self.connector = (
            OffloadingConnector(num_host_blocks, block_size, min_load_tokens, disk_level)
            if num_host_blocks
            else None
        )
        self.memory = KvMemory(block_size, load_fate, write_fate)
        self.scheduler = Scheduler(
            SchedulerConfig(**config),  # type: ignore[arg-type]
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            policy=policy or FcfsPolicy(),
            enable_prefix_caching=enable_prefix_caching,
            tracer=tracer,
            kv_connector=self.connector,
            on_request_ended=on_request_ended,
        )
        self.tokens: dict[str, list[int]] = {}
        """All tokens of every request that was added, prompt and output."""
        self.finished: dict[str, EngineCoreOutput] = {}
        self.last_plan: SchedulerOutput | None = None

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
    ) -> Request:
        """``job``: all that its client says of it; else it is named, or belongs to none."""
        if job is None and job_id is not None:
            job = JobRef(job_id, is_last_step, tenant)
        wanted = StructuredOutputsParams(json_object=True) if awaits_grammar else None
        request = Request(
            request_id,
            prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True, structured_outputs=wanted),
            self.clock.now(),
            priority=priority,
            cache_salt=cache_salt,
            job=job,
            block_hasher=self.scheduler.request_block_hasher,
        )
        self.tokens[request_id] = request.all_token_ids
        self.scheduler.add_request(request, self.clock.now())
        return request

    def step(self, seconds: float = 0.01) -> SchedulerOutput:
        """One schedule and its update; the clock moves in between."""
        plan = self.last_plan = self.scheduler.schedule(self.clock.now())
        reports = self.memory.execute(plan, self.scheduler.requests)
        self.clock.advance(seconds)
        ready = [self.scheduler.requests[i] for i in plan.num_scheduled_tokens]
        ready = [r for r in ready if r.num_computed_tokens == r.num_tokens]
        result = ModelRunnerOutput(
            [r.request_id for r in ready],
            [[crc32(f"{r.request_id}:{r.num_tokens}".encode())] for r in ready],
            finished_loads=reports.finished_loads,
            failed_loads=reports.failed_loads,
            finished_disk_writes=reports.finished_disk_writes,
            failed_disk_writes=reports.failed_disk_writes,
        )
        for output in self.scheduler.update_from_output(plan, result, self.clock.now()):
            if output.finished:
                assert output.request_id not in self.finished, "a request ended twice"
                self.finished[output.request_id] = output
        return plan

    def check_invariants(self) -> None:
        """The scheduler's own, and that blocks and slots hold what they are found for."""
        self.scheduler.check_invariants()
        findable = {
            b.block_id: b.block_hash for b in self.scheduler.kv.pool.blocks if b.block_hash is not None
        }
        connector = self.connector
        in_memory = connector.tier.contents() if connector else {}
        on_disk = connector.disk.tier.contents() if connector and connector.disk else {}
        self.memory.check_claims(findable, in_memory, on_disk)

    def run(self, max_steps: int = 1000) -> None:
        """Step until nothing is left; an engine that makes no progress fails here."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests() and not self.scheduler.num_pending_loads:
                return
            self.step()
        raise AssertionError(f"no end after {max_steps} steps: {self.scheduler.statistics()}")

"""One engine of a simulation: the real scheduler and policy in simulated time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.core.offload.offloading_connector import OffloadingConnector
from engine.core.outputs import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from engine.core.policy import SchedulingPolicy
from engine.core.scheduler import Scheduler
from engine.core.traced_scheduler import TracedScheduler
from engine.core_process.engine_core import STALLED_RETRY_S
from engine.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from engine.messages import EngineCoreOutput, Signal, TurnReceipt
from engine.reported_stats import SpecDecodingStats
from engine.routing import EngineLoad
from eval.sim.cost_model import StepCost
from eval.sim.disk_drive import DiskDrive, disk_level
from eval.sim.drafts import DraftCounts, SimDrafts
from eval.sim.event_heap import EventHeap
from eval.sim.host_link import HostLink
from eval.sim.kv_sizes import KvSizes
from eval.sim.sim_executor import SimExecutor
from eval.sim.sim_request import SimRequest
from tracing.events import TraceHeader
from tracing.tracer import Tracer

NO_PLAN = SchedulerOutput([], CachedRequestData(), {}, 0, set(), set())
"""The plan of a step that only waits for offloaded blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Sizes of one engine."""

    cost: StepCost
    scheduler: SchedulerConfig
    block_size: int
    num_blocks: int
    """Usable blocks."""
    num_host_blocks: int = 0
    """Copies that fit in host memory; 0: there is no second tier."""
    num_disk_blocks: int = 0
    """Copies that fit on the disk behind it; 0: there is none."""
    kv_cache_groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP
    num_states: int = 0
    """Usable state slots, for a model that has layers with states."""
    max_model_len: int
    enable_prefix_caching: bool = True
    stalled_retry_s: float = STALLED_RETRY_S
    """When requests wait and nothing can be scheduled, the scheduler is asked again after so long."""
    tracer: Tracer | None = None
    drafts: DraftCounts | None = None
    """What drafts bring; None: there are none."""


class Replica:
    """Steps while there is work, as ``EngineCore`` does; sleeps otherwise."""

    def __init__(
        self,
        config: ReplicaConfig,
        policy: SchedulingPolicy,
        events: EventHeap,
        on_outputs: Callable[[Iterable[EngineCoreOutput]], None],
    ) -> None:
        """``on_outputs`` is told at a step's end of the requests that ended in it."""
        sizes = KvSizes(config.block_size, config.kv_cache_groups)
        scheduler = Scheduler(
            config.scheduler,
            block_size=config.block_size,
            num_blocks=config.num_blocks + 1,
            max_model_len=config.max_model_len,
            policy=policy,
            enable_prefix_caching=config.enable_prefix_caching,
            kv_connector=(
                OffloadingConnector(
                    config.num_host_blocks,
                    config.block_size,
                    disk_level=disk_level(config.cost, sizes, config.num_disk_blocks),
                )
                if config.num_host_blocks
                else None
            ),
            kv_cache_groups=config.kv_cache_groups,
            num_states=config.num_states + 1 if config.num_states else 0,
        )
        self.scheduler = scheduler if config.tracer is None else TracedScheduler(scheduler, config.tracer)
        self.policy = policy
        self._drafts = None if config.drafts is None else SimDrafts(config.drafts)
        self.executor = SimExecutor(config.cost, self._drafts)
        self._drive = DiskDrive(config.cost, sizes)
        self._link = HostLink(config.cost, sizes, self._drive)
        self.pins_ended: Counter[str] = Counter()
        self.pin_block_s: Counter[str] = Counter()
        self.num_preemptions = 0
        self.num_loaded_tokens = 0
        self.num_disk_tokens = 0
        """How many of these were read from disk."""
        self.drafts = SpecDecodingStats()
        self.num_steps = 0
        self._stalled_retry_s = config.stalled_retry_s
        self._events = events
        self._on_outputs = on_outputs
        self._stepping = False
        self._nap = 0
        """Number of the sleep that a wake-up call was set for: later ones make it void."""

    def begin_trace(self) -> TraceHeader:
        """What the trace of a replica that has a tracer begins with."""
        assert isinstance(self.scheduler, TracedScheduler)
        return self.scheduler.begin_trace(0.0, self._events.now, from_start=True)

    @property
    def num_unfinished(self) -> int:
        return len(self.scheduler.requests)

    @property
    def load(self) -> EngineLoad:
        """What the engine would report of itself."""
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        num_open, num_running = len(scheduler.requests), len(scheduler.running)
        return EngineLoad(
            num_open,
            num_running,
            num_open - num_running,
            len(pool.blocks) - 1,
            pool.num_free_blocks,
            scheduler.kv.num_pinned_blocks,
        )

    def add_request(self, request: SimRequest) -> None:
        self.scheduler.add_request(request, self._events.now)
        self._wake()

    def signal(self, signal: Signal) -> TurnReceipt | None:
        """The policy's new decision about the turn."""
        receipt = self.scheduler.signal(signal, self._events.now)
        self._wake()
        return receipt

    def tell(self, signal: Signal) -> None:
        """A signal whose answer is not awaited."""
        self.signal(signal)

    def close(self) -> None:
        """End all pins and count them."""
        self.scheduler.close(self._events.now)
        self._count()

    def _wake(self) -> None:
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        """Begin a step, or sleep if there is nothing to run."""
        now = self._events.now
        self._nap += 1
        self._report_loads(now)
        if not self.scheduler.has_unfinished_requests():
            self.scheduler.expire(now)
            self._sleep_until(self.scheduler.next_due_s())
            return
        if self._drafts is not None:
            self.scheduler.update_draft_token_ids(self._drafts.propose(self.scheduler.running), now)
        plan = self.scheduler.schedule(now)
        self._link.start(plan.kv_loads, now)
        self._drive.write(plan.kv_disk_writes, now)
        if not plan.total_num_scheduled_tokens:
            retry_s = 0.0 if self.scheduler.replan_at_once else self._stalled_retry_s
            self._sleep_until(min(now + retry_s, self._link.next_done_s))
            return
        result, seconds = self.executor.execute(plan)
        self._stepping = True
        self.num_steps += 1
        self._events.at(now + seconds, lambda: self._end_step(plan, result))

    def _report_loads(self, now: float) -> None:
        """Tell the scheduler of copies that are done, as the next step's output would."""
        done, written = self._link.take_done(now), self._drive.take_written(now)
        if done or written:
            result = ModelRunnerOutput([], [], finished_loads=done, finished_disk_writes=written)
            self.scheduler.update_from_output(NO_PLAN, result, now)

    def _end_step(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        outputs = self.scheduler.update_from_output(plan, result, self._events.now)
        ended = [output for output in outputs if output.finish_reason is not None]
        if ended:
            self._on_outputs(ended)
            self._count()
        self._stepping = False
        self._step()

    def _sleep_until(self, time_s: float | None) -> None:
        if time_s is None:
            return
        nap = self._nap
        self._events.at(max(time_s, self._events.now), lambda: self._wake() if nap == self._nap else None)

    def _count(self) -> None:
        stats = self.scheduler.make_stats()
        self.pins_ended.update(stats.pins_ended)
        self.pin_block_s.update(stats.pin_block_s)
        self.num_preemptions += stats.num_preemptions
        self.num_loaded_tokens += stats.loaded_tokens
        self.num_disk_tokens += stats.disk_loaded_tokens
        if stats.spec_decoding is not None:
            self.drafts.add(stats.spec_decoding)

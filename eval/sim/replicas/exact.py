"""One engine of a simulation: the real scheduler and policy in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.core.offload.offloading_connector import OffloadingConnector
from engine.core.outputs import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from engine.core.policy import SchedulingPolicy
from engine.core.scheduler import Scheduler
from engine.core.traced_scheduler import TracedScheduler
from engine.records.lessons import Lesson
from engine.records.messages import EngineCoreOutput, Signal, TurnReceipt
from engine.routing import EngineLoad
from eval.sim.disk_drive import DiskDrive, disk_level
from eval.sim.drafts import SimDrafts
from eval.sim.event_heap import EventHeap
from eval.sim.host_link import HostLink
from eval.sim.kv_sizes import KvSizes
from eval.sim.replicas.replica import PausedTurn, PoolUse, ReplicaConfig, ReplicaCounts
from eval.sim.sim_executor import SimExecutor
from eval.sim.sim_request import SimRequest
from tracing.events import TraceHeader

NO_PLAN = SchedulerOutput([], CachedRequestData(), {}, 0, set(), set())
"""The plan of a step that only waits for offloaded blocks."""


class ExactReplica:
    """Steps while there is work, like ``EngineCore``; sleeps otherwise."""

    def __init__(
        self,
        config: ReplicaConfig,
        policy: SchedulingPolicy,
        events: EventHeap,
        on_outputs: Callable[[Iterable[EngineCoreOutput]], None],
    ) -> None:
        """Calls ``on_outputs`` at a step's end with the requests that ended in it."""
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
            loads_remote=config.loads_handed_over,
        )
        self.is_up = True
        self.scheduler = scheduler if config.tracer is None else TracedScheduler(scheduler, config.tracer)
        self._policy = policy
        self._drafts = None if config.drafts is None else SimDrafts(config.drafts)
        self._executor = SimExecutor(config.cost, self._drafts)
        self._drive = DiskDrive(config.cost, sizes)
        self._link = HostLink(config.cost, sizes, self._drive, config.kv_transfer_bandwidth)
        self._counts = ReplicaCounts()
        self._stalled_retry_s = config.stalled_retry_s
        self._events = events
        self._on_outputs = on_outputs
        self._stepping = False
        self._nap = 0
        """Number of the current sleep; a wake-up call for an earlier sleep is void."""

    def begin_trace(self) -> TraceHeader:
        """Returns the trace header of a replica that has a tracer."""
        assert isinstance(self.scheduler, TracedScheduler)
        return self.scheduler.begin_trace(0.0, self._events.now, from_start=True)

    @property
    def wants_signals(self) -> bool:
        return self._policy.wants_signals

    @property
    def num_unfinished(self) -> int:
        return len(self.scheduler.requests)

    @property
    def load(self) -> EngineLoad:
        scheduler = self.scheduler
        pool = self.scheduler.kv.pool
        num_open = len(scheduler.requests)
        num_running = len(scheduler.running)
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

    def num_new_tokens(self, request: SimRequest) -> int:
        raise NotImplementedError("prompts are computed elsewhere for coarse replicas only")

    def signal(self, signal: Signal) -> TurnReceipt | None:
        receipt = self.scheduler.signal(signal, self._events.now)
        self._wake()
        return receipt

    def take_lesson(self) -> Lesson | None:
        return self.scheduler.policy.take_lesson()

    def pool_use(self) -> PoolUse:
        scheduler = self.scheduler
        kv = self.scheduler.kv
        active = [*scheduler.running, *scheduler.loads.requests]
        tables = (kv.blocks_of_request(request.request_id) for request in active)
        num_held = len({block.block_id for table in tables for block in table})
        num_empty = kv.pool.num_free_empty_blocks
        return PoolUse(
            running=num_held,
            pinned=kv.pool.num_usable_blocks - kv.num_free_blocks - num_held,
            cached=kv.num_free_blocks - num_empty,
            free=num_empty,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + scheduler.loads.num_requests,
        )

    def paused_turns(self) -> list[PausedTurn]:
        policy = self.scheduler.policy
        return [
            PausedTurn(pin.held_hashes[-1], pin.num_prefix_blocks, policy.moved_turn(pin, self._events.now))
            for pin in policy.pins()
            if pin.held_hashes
        ]

    def restart(self) -> None:
        assert self.scheduler.reset_prefix_cache(self._events.now), "it has no requests"

    def close(self) -> ReplicaCounts:
        self.scheduler.close(self._events.now)
        self._count()
        counts = self._counts
        kv = self.scheduler.kv
        counts.num_computed_tokens = self._executor.num_computed_tokens
        counts.num_used_blocks = kv.pool.num_usable_blocks - kv.num_free_blocks
        return counts

    def _wake(self) -> None:
        if not self._stepping:
            self._step()

    def _step(self) -> None:
        """Begins a step, or sleeps if there is nothing to run."""
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
        result, seconds = self._executor.execute(plan)
        self._stepping = True
        self._counts.num_steps += 1
        self._events.at(now + seconds, lambda: self._end_step(plan, result))

    def _report_loads(self, now: float) -> None:
        """Reports finished copies to the scheduler, as the next step's output would."""
        done = self._link.take_done(now)
        written = self._drive.take_written(now)
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
        counts = self._counts
        counts.pins_ended.update(stats.pins_ended)
        counts.pin_block_s.update(stats.pin_block_s)
        counts.num_preemptions += stats.num_preemptions
        counts.num_loaded_tokens += stats.loaded_tokens
        counts.num_disk_tokens += stats.disk_loaded_tokens
        if stats.spec_decoding is not None:
            counts.drafts.add(stats.spec_decoding)

"""Simulates a grid of runs: jobs under several policies, loads and seeds, in several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tqdm import tqdm

from engine.config.engine_config import SchedulerConfig
from engine.errors import EngineError
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from eval.baselines.catalog import parse_policy
from eval.baselines.knowledge import NamedPolicy
from eval.errors import EvalError, HardwareError, UsageError
from eval.report.metrics import TTFT_LIMIT_S, RunResult, RunSetting, summarize
from eval.sim.cost_model import StepCost
from eval.sim.drafts import DraftCounts
from eval.sim.fitted import read_profile
from eval.sim.hardware import NVME
from eval.sim.model_folder import find_model
from eval.sim.replicas.make import COARSE, EXACT
from eval.sim.roofline import make_cost
from eval.sim.sim_config import KV_TRANSFER_GB_S, SimConfig
from eval.sim.simulator import Simulator
from eval.sim.trace import open_trace
from eval.workloads.arrivals import ArrivalKind, Arrivals
from eval.workloads.catalog import Workload, describe, open_workload, short_name
from eval.workloads.sampling import JobLimits

KV_BYTES = 2
"""Bytes of a KV element: bf16."""
STATE_SHARE = 0.4
"""Share of the pool's memory for states, in a model that has them: the engine's default."""
STATES_PER_SEQ = 8
"""State slots per running sequence beyond which more are useless: four that it may need, and as many
checkpoints."""
WAIT_S = 1.0
DETAIL_SEEDS = 1
"""Seeds of each policy and load for which the data for plots is kept: the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The simulated hardware: a preset pair, or a profile measured on some machine."""

    model: str
    gpu: str
    tensor_parallel: int | None = None
    dtype: str = "bf16"
    gpu_memory_utilization: float = 0.92
    profile: Path | None = None
    kv_tokens: int | None = None
    hybrid_kv_cache: bool = True
    """Whether layers with a sliding window or chunks hold only the KV of one."""

    def kv_cache_groups(self, block_size: int) -> tuple[KVCacheGroup, ...]:
        """The model's layers by the blocks they need; one full group for a profile, which lacks layers."""
        if self.profile is not None:
            return ONE_FULL_GROUP
        groups = find_model(self.model).kv_cache_groups(block_size, KV_BYTES)
        states = tuple(group for group in groups if group.is_state)
        return groups if self.hybrid_kv_cache else (*ONE_FULL_GROUP, *states)

    def split(self, kv_tokens: int, max_num_seqs: int) -> tuple[int, int]:
        """Splits a pool as large as ``kv_tokens`` of KV into tokens and state slots; without layers that have
        states, all of it is for KV."""
        model = find_model(self.model)
        state_bytes = 0 if self.profile is not None else model.state_bytes(KV_BYTES)
        if not state_bytes:
            return kv_tokens, 0
        pool_bytes = kv_tokens * model.kv_bytes_per_token(KV_BYTES)
        num_states = min(int(pool_bytes * STATE_SHARE) // state_bytes, STATES_PER_SEQ * max_num_seqs)
        if num_states < STATES_PER_SEQ:
            raise UsageError(
                f"{kv_tokens:,} tokens of KV leave memory for {num_states} states of {self.model}, of "
                f"{state_bytes / 1e6:.0f} MB each; {STATES_PER_SEQ} are the fewest: raise --kv-tokens."
            )
        return int(pool_bytes - num_states * state_bytes) // model.kv_bytes_per_token(KV_BYTES), num_states

    def cost(self) -> tuple[StepCost, int]:
        """The step costs, and the KV pool in tokens."""
        if self.profile is not None:
            fitted = read_profile(self.profile)
            if self.kv_tokens is None:
                raise UsageError(
                    "--profile needs --kv-tokens: a profile does not include the size of the KV pool."
                )
            return fitted, self.kv_tokens
        roofline = make_cost(self.model, self.gpu, tensor_parallel=self.tensor_parallel, dtype=self.dtype)
        if self.kv_tokens is not None:
            return roofline, self.kv_tokens
        kv_tokens = roofline.kv_tokens(self.gpu_memory_utilization)
        if kv_tokens <= 0:
            raise HardwareError(
                f"{roofline.describe()} leaves no memory for KV at --gpu-memory-utilization "
                f"{self.gpu_memory_utilization:g}: raise it or --tensor-parallel, or choose another --gpu, "
                "--dtype or --model."
            )
        return roofline, kv_tokens

    def describe(self) -> tuple[str, str]:
        """The model's name, and the hardware."""
        if self.profile is not None:
            profile = read_profile(self.profile).profile
            return profile.model, f"{profile.dtype}, step times as measured"
        return self.model, make_cost(
            self.model, self.gpu, tensor_parallel=self.tensor_parallel, dtype=self.dtype
        ).describe().removeprefix(f"{self.model} in ")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """Everything in a grid of runs except policy, load and seed; sent to processes."""

    workload: str
    num_jobs: int | None
    limits: JobLimits
    arrivals: ArrivalKind
    cv: float = 1.0
    concurrency: int | None = None
    hardware: Hardware
    host_kv_tokens: int = 0
    disk_kv_tokens: int = 0
    block_size: int = 16
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_replicas: int = 1
    replica_model: str = EXACT
    num_prefill_replicas: int = 0
    prefill_above: int = 0
    kv_transfer_gb_s: float = KV_TRANSFER_GB_S
    router: str = "jobs"
    upgrade_s: float | None = None
    upgrade_hands_over: bool = True
    tell_last_step: bool = False
    tell_parents: bool = False
    lessons: bool = False
    share_prefixes: bool = False
    ttft_limit_s: float = TTFT_LIMIT_S
    trace: Path | None = None
    drafts: DraftCounts | None = None

    def config(self) -> SimConfig:
        cost, pool_tokens = self.hardware.cost()
        kv_tokens, num_states = self.hardware.split(pool_tokens, self.scheduler.max_num_seqs)
        return SimConfig(
            cost=cost,
            kv_tokens=kv_tokens,
            num_states=num_states,
            host_kv_tokens=self.host_kv_tokens,
            disk_kv_tokens=self.disk_kv_tokens,
            kv_cache_groups=self.hardware.kv_cache_groups(self.block_size),
            block_size=self.block_size,
            scheduler=self.scheduler,
            num_replicas=self.num_replicas,
            replica_model=self.replica_model,
            num_prefill_replicas=self.num_prefill_replicas,
            prefill_above=self.prefill_above,
            kv_transfer_gb_s=self.kv_transfer_gb_s,
            router=self.router,
            upgrade_s=self.upgrade_s,
            upgrade_hands_over=self.upgrade_hands_over,
            tell_last_step=self.tell_last_step,
            tell_parents=self.tell_parents,
            lessons=self.lessons,
            share_prefixes=self.share_prefixes,
            drafts=self.drafts,
        )

    def arrivals_at(self, rate_per_s: float | None) -> Arrivals:
        return Arrivals(kind=self.arrivals, rate_per_s=rate_per_s, cv=self.cv, concurrency=self.concurrency)


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """One cell of the grid."""

    policy: str
    rate_per_s: float | None
    seed: int
    detail: bool
    """Whether to keep data for plots."""


def simulate_one(plan: SimulationPlan, run: SimulationRun, policy: NamedPolicy | None = None) -> RunResult:
    """Simulates one run. The same arguments give the same result, byte for byte.

    ``policy`` replaces the one that the run names.
    """
    config = plan.config()
    model, hardware = plan.hardware.describe()
    sample = _workload(plan.workload).sample(plan.num_jobs, run.seed, plan.limits)
    arrivals = plan.arrivals_at(run.rate_per_s)
    policy = policy or parse_policy(run.policy)
    with closing(open_trace(plan.trace, config)) as trace:
        simulator = Simulator(config, policy, sample.jobs, tracer=trace.tracer)
        played = simulator.run(arrivals.times_s(sample.jobs, run.seed), plan.concurrency)
    setting = RunSetting(
        name=policy.name,
        model=model,
        simulated=True,
        workload=short_name(plan.workload),
        seed=run.seed,
        jobs_per_s=run.rate_per_s,
        arrivals=arrivals.pattern,
        concurrency=plan.concurrency,
        num_replicas=plan.num_replicas + plan.num_prefill_replicas,
        hardware=hardware,
    )
    return summarize(
        setting,
        played.jobs,
        played.turns,
        played.counters,
        occupancy=played.occupancy,
        notes=[
            *sample.notes,
            *describe(sample.jobs),
            arrivals.describe(),
            *_notes(plan, config),
            *trace.notes(),
        ],
        ttft_limit_s=plan.ttft_limit_s,
        detail=run.detail,
    )


@cache
def _workload(name: str) -> Workload:
    """Reads the workload, once per process."""
    return open_workload(name)


def _notes(plan: SimulationPlan, config: SimConfig) -> list[str]:
    """Returns notes on what is set or assumed in a run rather than measured."""
    notes = [
        *config.cost.notes(),
        f"KV pool: {config.kv_tokens:,} tokens per replica, in blocks of {config.block_size}"
        + (f", of {len(config.kv_cache_groups)} groups" if config.has_windows else "")
        + (f", and {config.num_states} states" if config.num_states else ""),
        f"host memory: room for {config.host_kv_tokens:,} tokens of KV; stores are ASSUMED to cost nothing"
        if config.host_kv_tokens
        else "host memory: none",
        "system prompts are shared between jobs"
        if config.share_prefixes
        else "ASSUMED: jobs share no system prompt, unless the recording has block ids across jobs",
        "clients say which turn is a job's last"
        if config.tell_last_step
        else "clients do not say which turn is last",
        *(["clients of sub-agents say which job waits for them"] if config.tell_parents else []),
    ]
    if config.disk_kv_tokens:
        notes.append(
            f"disk: room for {config.disk_kv_tokens:,} tokens of KV on one {NVME.name} a replica, "
            f"{NVME.read_bandwidth / 1e9:g} GB/s read and {NVME.write_bandwidth / 1e9:g} GB/s written, "
            f"PUBLISHED; ASSUMED: {NVME.latency_s * 1e3:g} ms until the first byte"
        )
    if config.drafts is not None:
        notes.append(
            f"drafts as {config.drafts.drafter!r} had them on recorded texts, "
            f"{config.drafts.tokens_per_step:.2f} tokens per step; ASSUMED: alike under any load"
        )
    if config.replica_model == COARSE:
        notes.append("engines are simulated COARSELY: with a few events per turn, and without preemptions")
    if config.num_prefill_replicas:
        above = config.prefill_above
        which = f"with more than {above:,} new tokens" if above else "of all turns"
        notes.append(
            f"{config.num_prefill_replicas} more replicas compute prompts {which}; ASSUMED: their KV is "
            f"sent at {config.kv_transfer_gb_s:g} GB/s a replica, one prompt after another, when complete"
        )
    if config.num_replicas > 1:
        notes.append(f"{config.num_replicas} replicas behind a {config.router} router")
    if config.upgrade_s is not None:
        fate = "is lost"
        if config.upgrade_hands_over:
            fate = f"is handed over; ASSUMED: the next turn reads it at {config.kv_transfer_gb_s:g} GB/s"
        notes.append(
            f"the replicas are replaced one after another, each in {config.upgrade_s:g} s; the KV of "
            f"paused jobs {fate}"
        )
    return notes


def simulate(plan: SimulationPlan, runs: Sequence[SimulationRun], num_processes: int) -> list[RunResult]:
    """Simulates all runs, in order, with progress on stderr."""
    _workload(plan.workload)  # a bad file fails before anything starts; forked processes inherit the workload
    plan.config()
    policies = {name: parse_policy(name) for name in {run.policy for run in runs}}
    with tqdm(total=len(runs), unit="run", file=sys.stderr, disable=None, leave=False) as bar:
        results = []
        for result in _results(plan, runs, policies, min(num_processes, len(runs))):
            setting = result.setting
            bar.set_postfix_str(f"{setting.name}, {setting.jobs_per_s or 0:g}/s, seed {setting.seed}")
            bar.update()
            results.append(result)
    return results


def _results(
    plan: SimulationPlan,
    runs: Sequence[SimulationRun],
    policies: Mapping[str, NamedPolicy],
    num_processes: int,
) -> Iterator[RunResult]:
    """``policies`` are made once, so that state read from a file is the same in every run."""
    if num_processes <= 1:
        for run in runs:
            yield _simulate_one(plan, run, policies[run.policy])
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(num_processes, context, _begin_worker) as pool:
        try:
            with _interrupts_afterwards():
                futures = [pool.submit(_simulate_one, plan, run, policies[run.policy]) for run in runs]
            for future in futures:
                # During an endless wait, Python would notice an earlier Ctrl-C only at its end.
                while not wait([future], timeout=WAIT_S).done:
                    pass
                yield future.result()
        except BrokenProcessPool as error:
            raise EvalError(
                "A process that simulated was killed, perhaps for the memory it took: try fewer --processes."
            ) from error
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # the run may take minutes, and its result is not read
            # Without waiting, the pool's thread may close the pipe that Python writes to at its exit.
            pool.shutdown(cancel_futures=True)
            raise


def _simulate_one(plan: SimulationPlan, run: SimulationRun, policy: NamedPolicy) -> RunResult:
    """Raises EvalError, with the faulty line, if a user's own policy fails."""
    try:
        return simulate_one(plan, run, policy)
    except EngineError:
        raise
    except Exception as error:
        file = getattr(sys.modules.get(run.policy.partition(":")[0]), "__file__", None)
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if file is None or not own:
            raise
        where = f"{file}:{own[-1].lineno}, in {own[-1].name}"
        raise EvalError(f"Policy {run.policy}: {where}: {type(error).__name__}: {error}") from error


@contextmanager
def _interrupts_afterwards() -> Iterator[None]:
    """Delays a Ctrl-C until after the block: during a fork Python would lose it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupts:
        raise KeyboardInterrupt


def _begin_worker() -> None:
    """Leaves Ctrl-C to the parent; ends with the parent, however that ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def grid(policies: Sequence[str], rates: Sequence[float | None], seeds: Sequence[int]) -> list[SimulationRun]:
    """Returns every policy at every load with every seed."""
    return [
        SimulationRun(policy, rate, seed, detail=seed in seeds[:DETAIL_SEEDS])
        for rate in rates
        for seed in seeds
        for policy in policies
    ]

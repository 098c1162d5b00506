"""Simulates a published setting at its load and, if memory is not short there, at a higher one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec

from engine.config.engine_config import SchedulerConfig
from eval.load.records import Occupancy, told
from eval.report.intervals import Estimate, mean_interval, ratio_interval
from eval.report.metrics import RunResult
from eval.reproduction.observed_rule import RetentionTimes, observe_rule
from eval.reproduction.published import BASELINE, GB, ORDER, PEERS, RULE, Measure, Setting
from eval.sim.simulate import Hardware, SimulationPlan, SimulationRun, grid, simulate
from eval.workloads.arrivals import ArrivalKind
from eval.workloads.sampling import JobLimits

STEP_TOKENS = 2048
"""The paper's chunk size."""
BLOCK_SIZE = 16
GAP_CAP_S = 600.0
PRESSURE_SHARE = 0.1
"""Memory is short if fcfs recomputes or loads back at least this share of all prompt tokens."""
FACTORS = (2, 4, 8)
"""Multiples of the published load; only the first one at which memory is short is used."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Statistics of a policy, averaged over seeds."""

    recomputed_share: float
    """Share of the prompt tokens that were recomputed."""
    loaded_share: float
    """Share of the prompt tokens that were loaded back from host memory."""
    return_s: float
    """Mean time to first token of returning turns."""
    preemptions_per_turn: float
    pin_shares: dict[str, float]
    """Shares of pins by how they ended."""
    last_share: float
    """Share of turns that were the last of a job."""

    @classmethod
    def of(cls, runs: Sequence[RunResult]) -> Behaviour:
        prompt_tokens = sum(run.prompt_tokens for run in runs)
        pins = {cause for run in runs for cause in run.pins_ended}
        num_pins = sum(sum(run.pins_ended.values()) for run in runs)
        return_s = [run.returning_ttft_s.mean for run in runs if run.returning_ttft_s is not None]
        return cls(
            sum(told(run.recomputed_tokens) for run in runs) / prompt_tokens,
            sum(run.host_tokens_loaded or 0 for run in runs) / prompt_tokens,
            math.fsum(return_s) / max(1, len(return_s)),
            sum(run.num_preemptions or 0 for run in runs) / sum(run.num_turns for run in runs),
            {cause: sum(run.pins_ended.get(cause, 0) for run in runs) / num_pins for cause in sorted(pins)},
            sum(run.num_jobs for run in runs) / sum(run.num_turns for run in runs),
        )

    @property
    def is_pressed(self) -> bool:
        """Whether memory was short; only meaningful for fcfs."""
        return self.recomputed_share + self.loaded_share >= PRESSURE_SHARE


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Shares of the KV pool that running requests use."""

    mean: float
    most: float

    @classmethod
    def of(cls, occupancy: Occupancy) -> PoolUse | None:
        """Weights each sample by the time until the next one. None without two samples."""
        num_blocks = occupancy.running[0] + occupancy.pinned[0] + occupancy.cached[0] + occupancy.free[0]
        spans_s = [later - earlier for earlier, later in pairwise(occupancy.time_s)]
        if not math.fsum(spans_s):
            return None
        held = math.fsum(n * span_s for n, span_s in zip(occupancy.running, spans_s, strict=False))
        return cls(held / math.fsum(spans_s) / num_blocks, max(occupancy.running) / num_blocks)


@dataclass(frozen=True, slots=True)
class Point:
    """A setting as it ran, at the published load or a multiple of it."""

    setting: Setting
    factor: int
    runs: dict[str, list[RunResult]]
    """Runs by policy, in the order of the seeds."""
    retention_times: RetentionTimes | None
    """Times to live that the paper's rule set, with the first seed; None if memory was not short."""
    order_alone: RunResult | None = None
    """A run of ORDER with the first seed; None if memory was not short."""

    def seconds(self, policy: str) -> Estimate:
        return mean_interval([_seconds(run, self.setting.measure) for run in self.runs[policy]])

    def multiple(self, policy: str, base: str = BASELINE) -> Estimate:
        """Returns the delay of ``base`` over the policy's, paired by seed: above 1 the policy is faster."""
        measure = self.setting.measure
        pairs = [
            (_seconds(run, measure), _seconds(other, measure))
            for run, other in zip(self.runs[policy], self.runs[base], strict=True)
        ]
        estimate = ratio_interval(pairs)
        assert estimate is not None
        return estimate

    def first_multiple(self, run: RunResult) -> float:
        """Returns fcfs' delay over that of a run with the first seed."""
        base = self.runs[BASELINE][0]
        return _seconds(base, self.setting.measure) / _seconds(run, self.setting.measure)

    def behaviour(self, policy: str) -> Behaviour:
        return Behaviour.of(self.runs[policy])

    def pool_use(self) -> PoolUse | None:
        """Returns the pool use of fcfs, with the first seed; None if no samples were kept."""
        occupancy = self.runs[BASELINE][0].occupancy
        return None if occupancy is None else PoolUse.of(occupancy)


def _seconds(run: RunResult, measure: Measure) -> float:
    assert run.job_completion_s is not None
    return run.job_completion_s.mean if measure is Measure.MEAN else run.job_completion_s.p95


class Experiment:
    """Runs settings; a run that two settings share is made once."""

    def __init__(
        self,
        num_jobs: int,
        seeds: Sequence[int],
        num_processes: int,
        tell: Callable[[str], None],
        *,
        with_peers: bool = True,
    ) -> None:
        """``tell`` receives a progress line before each setting."""
        self._num_jobs = num_jobs
        self._seeds = seeds
        self._num_processes = num_processes
        self._tell = tell
        self._with_peers = with_peers
        self._results: dict[tuple[SimulationPlan, SimulationRun], RunResult] = {}
        self._hold_times: dict[tuple[SimulationPlan, SimulationRun], RetentionTimes | None] = {}

    @property
    def results(self) -> list[RunResult]:
        """Returns all runs so far."""
        return list(self._results.values())

    def points(self, setting: Setting, *, needs_pressure: bool) -> list[Point]:
        """Runs the setting at its load; if ``needs_pressure`` and memory is not short, also where it first
        is."""
        if self._is_pressed(setting, 1):
            return [self._point(setting, 1, self._seeds, is_pressed=True)]
        # Then all policies behave alike: more seeds would show nothing more.
        points = [self._point(setting, 1, self._seeds[:1], is_pressed=False)]
        if setting.jobs_per_s is not None and needs_pressure:
            factor = next((factor for factor in FACTORS if self._is_pressed(setting, factor)), None)
            if factor is not None:
                points.append(self._point(setting, factor, self._seeds, is_pressed=True))
        return points

    def _is_pressed(self, setting: Setting, factor: int) -> bool:
        """Whether memory is short at ``factor`` times the load, by the first seed."""
        load = _at(setting, factor)
        first = grid([BASELINE], [load.jobs_per_s], self._seeds)[:1]
        return Behaviour.of(self._run(plan_of(setting, self._num_jobs), first)).is_pressed

    def _point(self, setting: Setting, factor: int, seeds: Sequence[int], *, is_pressed: bool) -> Point:
        load = _at(setting, factor)
        self._tell(load.title)
        plan = plan_of(setting, self._num_jobs)
        runs = [
            run
            for run in grid(load.policies, [load.jobs_per_s], seeds)
            if self._with_peers or run.policy not in PEERS
        ]
        retention_times = order_alone = None
        if is_pressed and RULE in load.policies:
            rule = next(run for run in runs if run.policy == RULE)
            retention_times = self._observe(plan, rule)
            order_alone = self._run(plan, [replace(rule, policy=ORDER)])[0]
        by_policy: dict[str, list[RunResult]] = {}
        for run, result in zip(runs, self._run(plan, runs), strict=True):
            by_policy.setdefault(run.policy, []).append(result)
        return Point(load, factor, by_policy, retention_times, order_alone)

    def _run(self, plan: SimulationPlan, runs: Sequence[SimulationRun]) -> list[RunResult]:
        missing = [run for run in runs if (plan, run) not in self._results]
        if missing:
            for run, result in zip(missing, simulate(plan, missing, self._num_processes), strict=True):
                self._results[plan, run] = with_host(result, plan)
        return [self._results[plan, run] for run in runs]

    def _observe(self, plan: SimulationPlan, run: SimulationRun) -> RetentionTimes | None:
        if (plan, run) not in self._hold_times:
            result, self._hold_times[plan, run] = observe_rule(plan, run)
            self._results[plan, run] = with_host(result, plan)
        return self._hold_times[plan, run]


def _at(setting: Setting, factor: int) -> Setting:
    """Returns the setting at ``factor`` times its load."""
    return setting if setting.jobs_per_s is None else replace(setting, jobs_per_s=setting.jobs_per_s * factor)


def plan_of(setting: Setting, num_jobs: int) -> SimulationPlan:
    """Returns the plan of a setting, which may state its number of jobs itself. Leaves out jobs that never
    fit in the pool."""
    engine = setting.engine
    hardware = Hardware(
        model=setting.model,
        gpu=setting.gpu,
        tensor_parallel=setting.tensor_parallel,
        profile=None if engine is None else engine.profile,
        kv_tokens=None if engine is None else engine.kv_tokens,
    )
    cost, kv_tokens = hardware.cost()
    scheduler = SchedulerConfig(max_num_batched_tokens=STEP_TOKENS)
    if engine is not None:
        scheduler = SchedulerConfig(
            max_num_batched_tokens=engine.step_tokens, max_num_seqs=engine.max_num_seqs
        )
    if setting.arrivals_s is not None and setting.jobs_per_s is not None:
        num_jobs = round(setting.arrivals_s * setting.jobs_per_s)
    return SimulationPlan(
        workload=setting.workload,
        num_jobs=num_jobs,
        limits=JobLimits(max_context_tokens=kv_tokens - BLOCK_SIZE, gap_cap_s=GAP_CAP_S),
        arrivals=ArrivalKind.CLOSED if setting.jobs_per_s is None else ArrivalKind.POISSON,
        concurrency=setting.concurrency,
        hardware=hardware,
        host_kv_tokens=int(setting.host_gb * GB // cost.kv_bytes_per_token),
        block_size=BLOCK_SIZE,
        scheduler=scheduler,
    )


def with_host(result: RunResult, plan: SimulationPlan) -> RunResult:
    """Adds host memory to the result's hardware, which distinguishes results in one file."""
    if not plan.host_kv_tokens:
        return result
    hardware = f"{result.setting.hardware}, {plan.host_kv_tokens:,} tokens of host KV"
    setting = msgspec.structs.replace(result.setting, hardware=hardware)
    return msgspec.structs.replace(result, setting=setting)

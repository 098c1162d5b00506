"""Simulates a trace's jobs under another policy, for comparison with what was recorded."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace
from tqdm import tqdm

from continuum.policy import ContinuumPolicy
from engine.config.engine_config import SchedulerConfig
from engine.core.policy import PolicyContext, SchedulingPolicy
from eval.baselines.catalog import parse_policy
from eval.baselines.knowledge import Knowledge, NamedPolicy
from eval.errors import CostModelError
from eval.report.metrics import RunResult, RunSetting, summarize
from eval.sim.cost_model import StepCost
from eval.sim.fitted import FittedCost, fit_steps
from eval.sim.kv_sizes import KvSizes
from eval.sim.sim_config import SimConfig
from eval.sim.simulate import Hardware
from eval.sim.simulator import Simulator
from eval.sim.step_samples import step_samples
from eval.trace.recorded_groups import recorded_groups
from eval.trace.replay.errors import NotReplayableError, check_tells_engine
from eval.trace.replay.recorded_policy import TOLD_THE_FUTURE, recorded_policy
from eval.trace.replay.recorded_run import RecordedRun, read_run
from eval.workloads.families import roots
from tracing.events import TraceHeader
from tracing.reader import TraceError, read_trace

THIS_ENGINE = "the engine of this trace"


@dataclass(frozen=True, slots=True)
class _AsRecorded:
    """The policy of the trace, with its recorded options and learned state."""

    run: RecordedRun

    def __call__(self, context: PolicyContext, knowledge: Knowledge) -> SchedulingPolicy:
        header = self.run.header
        if header.policy in TOLD_THE_FUTURE:
            return _expecting(parse_policy(header.policy).make(context, knowledge), self.run)
        return _expecting(recorded_policy(header)(context), self.run)


@dataclass(frozen=True, slots=True)
class _Knowing:
    """Another policy; one that learns about tools starts with what the recorded one had learned, unless its
    own options say otherwise."""

    policy: NamedPolicy
    run: RecordedRun

    def __call__(self, context: PolicyContext, knowledge: Knowledge) -> SchedulingPolicy:
        policy = self.policy.make(context, knowledge)
        state = self.run.header.estimator_state
        if state is not None and isinstance(policy, ContinuumPolicy) and policy.tools.state() is None:
            policy.tools.recall(state)
        return _expecting(policy, self.run)


def _expecting(policy: SchedulingPolicy, run: RecordedRun) -> SchedulingPolicy:
    """Makes unnamed jobs count as single-turn requests at first, as in the engine of the trace."""
    if isinstance(policy, ContinuumPolicy):
        policy.expect_unnamed(run.unnamed)
    return policy


def what_if(path: Path, policy: str, hardware: Hardware | None) -> list[RunResult]:
    """Returns three runs: the recorded policy simulated, ``policy`` simulated, and the recorded run.

    ``hardware`` None: costs are fitted to the trace's own steps. PolicyError for an unknown policy,
    CostModelError if the steps are too few or too alike for a fit.
    """
    other = parse_policy(policy)
    run = read_run(path)
    try:
        check_tells_engine(run.header)
    except NotReplayableError as error:
        raise TraceError(f"{path}: {error}") from error
    cost = _fitted(path, run.header) if hardware is None else hardware.cost()[0]
    model, device = (THIS_ENGINE, None) if hardware is None else hardware.describe()
    setting = RunSetting(
        name="", model=model, hardware=device, simulated=True, workload=path.name, arrivals="recorded"
    )
    policies = [
        NamedPolicy(f"{run.header.policy} again", _AsRecorded(run)),
        NamedPolicy(other.name, _Knowing(other, run)),
    ]
    results = []
    for one in tqdm(policies, unit="run", file=sys.stderr, disable=None, leave=False):
        results.append(_simulated(run, one, cost, replace(setting, name=one.name)))
    recorded = summarize(
        replace(setting, name="recorded", model=THIS_ENGINE, hardware=None, simulated=False),
        run.job_records,
        run.turn_records,
        run.counters,
        notes=["as the engine saw it, from a turn's arrival to its end there"],
    )
    return [*results, recorded]


def _simulated(run: RecordedRun, policy: NamedPolicy, cost: StepCost, setting: RunSetting) -> RunResult:
    header = run.header
    groups = recorded_groups(header)
    sizes = KvSizes(header.block_size, groups)
    config = SimConfig(
        cost=cost,
        kv_tokens=sizes.num_tokens(header.num_blocks),
        kv_cache_groups=groups,
        num_states=header.num_states,
        host_kv_tokens=sizes.num_tokens(header.num_host_blocks),
        disk_kv_tokens=sizes.num_tokens(header.num_disk_blocks),
        block_size=header.block_size,
        scheduler=SchedulerConfig(
            max_num_seqs=header.max_num_seqs,
            max_loras=header.max_loras or None,
            max_num_batched_tokens=header.max_num_batched_tokens,
            enable_chunked_prefill=header.enable_chunked_prefill,
            long_prefill_token_threshold=header.long_prefill_token_threshold,
            scheduler_reserve_full_isl=header.scheduler_reserve_full_isl,
        ),
    )
    simulator = Simulator(config, policy, run.jobs)
    played = simulator.run([job.arrival_s or 0.0 for job in roots(run.jobs)])
    return summarize(
        setting,
        played.jobs,
        played.turns,
        played.counters,
        occupancy=played.occupancy,
        notes=[*run.notes, *cost.notes()],
    )


def _fitted(path: Path, header: TraceHeader) -> FittedCost:
    """Fits costs to the time from each step of the trace to the next."""
    try:
        fit = fit_steps(list(step_samples(read_trace(path, progress=True))))
    except CostModelError as error:
        raise CostModelError(
            f"{error} Or give --profile, or --model and --gpu, to say what a step costs."
        ) from error
    profile = fit.profile(
        model=THIS_ENGINE,
        dtype="its own type",
        kv_bytes_per_token=0,
        step_tokens=header.max_num_batched_tokens,
    )
    return FittedCost(profile)

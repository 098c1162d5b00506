"""Runs the same jobs on a real server and in the simulator, and compares the results.

``python -m benchmarks.simulator.reality`` makes a small model, measures its costs on this machine, replays
synthetic jobs over HTTP with a small KV pool, and simulates exactly what was sent and answered.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from engine.config.engine_config import SchedulerConfig
from engine.errors import EngineError
from eval.arguments import amount, count, positive
from eval.baselines.catalog import parse_policy
from eval.errors import EvalError
from eval.load.bench_run import BenchOptions, run_bench
from eval.load.planner import Limits
from eval.load.records import JobRecord, TurnRecord, read_records, told
from eval.load.server_process import ServerProcess, unwound_by_sigterm
from eval.profile.command import Measurement, ProfileOptions, fit_profile, from_trace, measure, render
from eval.sim.cost_model import StepCost
from eval.sim.fitted import CostProfile, FittedCost, write_profile
from eval.sim.sim_config import SimConfig
from eval.sim.simulator import SimRun, Simulator
from eval.workloads.arrivals import ArrivalKind, Arrivals
from eval.workloads.bench_records import read_bench_records
from eval.workloads.catalog import RecordedWorkload
from eval.workloads.job import Job
from eval.workloads.synthetic import SOURCE, SyntheticConfig, make_jobs

MODEL_NAME = "reality"


@dataclass(frozen=True, slots=True, kw_only=True)
class RealityConfig:
    """A comparison; the defaults take about four minutes on two cores."""

    out: Path = Path("out/reality")
    policies: tuple[str, ...] = ("fcfs", "continuum")
    num_jobs: int = 12
    seeds: tuple[int, ...] = (0, 1)
    repeats: int = 1
    """Repeats of serving the same jobs, which show how far real runs differ."""
    jobs_per_s: float = 1.0
    """Arrival rate of jobs (Poisson)."""
    max_turns: int | None = None
    time_scale: float = 1.0
    """Factor on tool times."""
    hidden_size: int = 128
    num_layers: int = 4
    max_context_tokens: int = 4096
    kv_tokens: int = 6144
    block_size: int = 16
    step_tokens: int = 1024
    profile_seconds: float = 20.0
    """Seconds of each measurement of costs; there is one more than there are runs."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One run of a server."""

    policy: str
    seed: int
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.policy}-{self.seed}-{self.repeat}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One workload under one policy, served and simulated. Times in seconds; lists have one item per job."""

    policy: str
    seed: int
    repeat: int
    profile: CostProfile
    """The costs that the simulation used."""
    real_s: list[float]
    """Real completion times."""
    simulated_s: list[float]
    real_hit_share: float
    """Share of prompt tokens found in the cache."""
    simulated_hit_share: float
    own_costs_s: list[float]
    """Completion times, simulated with costs fitted to the real run's own steps: the remaining error is the
    simulation's, not that of a machine whose speed has changed since it was measured."""
    drift: float
    """Cost of the run's steps by the measurement after it, over that by the measurement before it."""

    @property
    def ratio(self) -> float:
        """Returns the mean completion time, simulated over real."""
        return statistics.fmean(self.simulated_s) / statistics.fmean(self.real_s)

    @property
    def own_costs_ratio(self) -> float:
        return statistics.fmean(self.own_costs_s) / statistics.fmean(self.real_s)

    @property
    def rank_correlation(self) -> float:
        """Returns Spearman's rank correlation of the jobs' completion times; assumes no ties."""
        ranks = [np.argsort(np.argsort(times_s)) for times_s in (self.real_s, self.simulated_s)]
        return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def compare(config: RealityConfig) -> list[Comparison]:
    """Compares every policy with every seed; leaves records, traces and profiles in ``config.out``.

    Costs are measured before and after each run of the server, and each run is simulated with both
    measurements: the speed of a shared machine changes from minute to minute.
    """
    model = _make_model(config)
    cases = [
        _Case(policy, seed, repeat)
        for repeat in range(config.repeats)
        for seed in config.seeds
        for policy in config.policies
    ]
    options = _profile_options(config, model)
    comparisons: list[Comparison] = []
    before = measure(options)
    for case in cases:
        _serve(config, model, case)
        after = measure(options)
        comparisons.append(_compare_one(config, case, options, before, after))
        before = after
    return comparisons


def _make_model(config: RealityConfig) -> Path:
    from engine.worker.loading.tiny_models import (
        make_model_folder,  # loads torch, which nothing else here needs
    )

    return make_model_folder(
        config.out / "model",
        family="qwen3",
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        vocab_size=2048,
        max_position_embeddings=config.max_context_tokens,
    )


def _profile_options(config: RealityConfig, model: Path) -> ProfileOptions:
    # With blocks for many contexts: a cache that evicts would leave only cold prefills to measure.
    pool = ("--num-gpu-blocks-override", str(16 * config.kv_tokens // config.block_size))
    return ProfileOptions(
        model=str(model), seconds=config.profile_seconds, serve_flags=(*_engine_flags(config), *pool)
    )


def _serve(config: RealityConfig, model: Path, case: _Case) -> None:
    """Replays the jobs of a seed against a fresh server; EvalError if a turn failed."""
    records = _records(config, case)
    records.unlink(missing_ok=True)
    _trace(config, case).unlink(missing_ok=True)
    with ServerProcess(_serve_arguments(config, model, case), config.out / f"{case.name}.log") as server:
        options = BenchOptions(
            base_url=server.base_url,
            workload=RecordedWorkload(SOURCE, tuple(_jobs(config, case.seed))),
            name=case.name,
            limits=Limits(
                max_turns=config.max_turns,
                max_context_tokens=config.max_context_tokens,
                time_scale=config.time_scale,
            ),
            arrivals=Arrivals(kind=ArrivalKind.POISSON, rate_per_s=config.jobs_per_s),
            seed=case.seed,
            records=records,
        )
        run = asyncio.run(run_bench(options))
    failed = [turn for turn in run.turns if turn.error is not None]
    if failed:
        raise EvalError(f"{case.name}, job {failed[0].job_id}, turn {failed[0].turn}: {failed[0].error}.")


def _serve_arguments(config: RealityConfig, model: Path, case: _Case) -> list[str]:
    return [
        str(model),
        *("--scheduling-policy", case.policy),
        *("--served-model-name", MODEL_NAME),
        *("--host", "127.0.0.1"),
        *("--port", "0"),
        *_engine_flags(config),
        *("--num-gpu-blocks-override", str(config.kv_tokens // config.block_size + 1)),
        *("--trace", str(_trace(config, case))),
    ]


def _engine_flags(config: RealityConfig) -> tuple[str, ...]:
    return ("--block-size", str(config.block_size), "--max-num-batched-tokens", str(config.step_tokens))


def _records(config: RealityConfig, case: _Case) -> Path:
    return config.out / f"{case.name}.jsonl"


def _trace(config: RealityConfig, case: _Case) -> Path:
    return config.out / f"{case.name}-trace.jsonl"


def _jobs(config: RealityConfig, seed: int) -> list[Job]:
    return make_jobs(
        SyntheticConfig(
            num_jobs=config.num_jobs,
            seed=seed,
            min_turns=4,
            max_turns=8,
            system_words=100,
            task_words=200,
            result_words=70,
            thought_words=3,
        )
    )


def _compare_one(
    config: RealityConfig, case: _Case, options: ProfileOptions, before: Measurement, after: Measurement
) -> Comparison:
    profile = fit_profile(options, (before, after))
    write_profile(config.out / f"{case.name}-profile.json", profile)
    real = read_records(_records(config, case))
    run = from_trace(_trace(config, case))
    simulated = _simulate_case(config, case, profile)
    again = _simulate_case(config, case, _with_own_steps(options, profile, run))
    return Comparison(
        policy=case.policy,
        seed=case.seed,
        repeat=case.repeat,
        profile=profile,
        real_s=[job.completion_s for job in real.jobs],
        simulated_s=_completions_s(simulated, real.jobs),
        own_costs_s=_completions_s(again, real.jobs),
        real_hit_share=_hit_share(real.turns),
        simulated_hit_share=_hit_share(simulated.turns),
        drift=_cost_of(run, options, after) / _cost_of(run, options, before),
    )


def _simulate_case(config: RealityConfig, case: _Case, profile: CostProfile) -> SimRun:
    return simulate_records(config, FittedCost(profile), case.policy, _records(config, case))


def _with_own_steps(options: ProfileOptions, profile: CostProfile, run: Measurement) -> CostProfile:
    """Returns costs fitted to the run's own steps; overheads around the engine are those measured apart."""
    own = fit_profile(options, [run])
    return msgspec.structs.replace(own, arrival_s=profile.arrival_s, reply_s=profile.reply_s)


def _cost_of(run: Measurement, options: ProfileOptions, measurement: Measurement) -> float:
    """Returns the seconds that the run's steps would take by a measurement's costs."""
    cost = FittedCost(fit_profile(options, [measurement]))
    return sum(cost.step_s(sample.work) for sample in run.samples)


def _completions_s(simulated: SimRun, jobs: Sequence[JobRecord]) -> list[float]:
    completion_s = {job.job_id: job.completion_s for job in simulated.jobs}
    return [completion_s[job.job_id] for job in jobs]


def _hit_share(turns: Sequence[TurnRecord]) -> float:
    return sum(told(turn.cached_tokens) for turn in turns) / sum(turn.prompt_tokens for turn in turns)


def simulate_records(config: RealityConfig, cost: StepCost, policy: str, records: Path) -> SimRun:
    """Simulates what a replay sent: its token counts, gaps and arrivals."""
    jobs = _with_shared_prompt(read_bench_records(records)[0], read_records(records).turns)
    simulator = Simulator(
        SimConfig(
            cost=cost,
            kv_tokens=config.kv_tokens,
            block_size=config.block_size,
            scheduler=SchedulerConfig(max_num_batched_tokens=config.step_tokens),
            tell_last_step=True,
            share_prefixes=True,
        ),
        parse_policy(policy),
        jobs,
    )
    return simulator.run([job.arrival_s or 0.0 for job in jobs])


def _with_shared_prompt(jobs: Sequence[Job], turns: Sequence[TurnRecord]) -> list[Job]:
    """Returns the jobs with a shared prefix: the most tokens that a job found cached on its first turn."""
    shared = max(told(turn.cached_tokens) for turn in turns if turn.turn == 1)
    return [replace(job, shared_prefix="system", shared_prefix_tokens=shared) for job in jobs]


def report(comparisons: Sequence[Comparison]) -> str:
    """Returns a line per comparison, and the worst of all."""
    lines = [
        "mean job completion time, and the share of prompt tokens found in the cache:",
        "policy     seed run      real simulated  ratio  own costs  drift  rank corr.  hits real  simulated",
    ]
    for one in comparisons:
        lines.append(
            f"{one.policy:10} {one.seed:4} {one.repeat:3} {statistics.fmean(one.real_s):7.2f} s "
            f"{statistics.fmean(one.simulated_s):7.2f} s {one.ratio:6.2f} {one.own_costs_ratio:10.2f} "
            f"{one.drift:6.2f} {one.rank_correlation:11.2f} {one.real_hit_share:10.0%} "
            f"{one.simulated_hit_share:10.0%}"
        )
    for policy in dict.fromkeys(one.policy for one in comparisons):
        lines.append(f"{policy:10}  all {_overall(policy, comparisons)}")
    correlation = min(one.rank_correlation for one in comparisons)
    lines += [
        "own costs: the ratio with costs taken from the real run; drift: costs after it over before it",
        f"one run is off by {_errors([one.ratio for one in comparisons])}",
        f"with own costs by {_errors([one.own_costs_ratio for one in comparisons])}",
        f"rank correlation at least {correlation:.2f}",
    ]
    return "\n".join(lines)


def _overall(policy: str, comparisons: Sequence[Comparison]) -> str:
    """Returns the mean over all runs of a policy: in which direction the simulator errs."""
    own = [one for one in comparisons if one.policy == policy]
    real_s = statistics.fmean(statistics.fmean(one.real_s) for one in own)
    simulated_s = statistics.fmean(statistics.fmean(one.simulated_s) for one in own)
    own_costs_s = statistics.fmean(statistics.fmean(one.own_costs_s) for one in own)
    return f"{real_s:11.2f} s {simulated_s:7.2f} s {simulated_s / real_s:6.2f} {own_costs_s / real_s:10.2f}"


def _errors(ratios: Sequence[float]) -> str:
    errors = [abs(ratio - 1) for ratio in ratios]
    return f"{statistics.fmean(errors):.0%} on average, {max(errors):.0%} at worst"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Exit code 1, with one sentence, if something cannot be run."""
    default = RealityConfig()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator.reality", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=default.out, metavar="FOLDER", help="model, profiles, records and traces")
    add("--jobs", type=count, default=default.num_jobs, metavar="N", help="per seed")
    add("--seeds", type=count, default=len(default.seeds), metavar="N", help="number of sets of jobs")
    add("--repeats", type=count, default=default.repeats, metavar="N", help="how often each set is served")
    add("--policies", nargs="+", default=default.policies, metavar="P", help="what to compare")
    add("--rate", type=positive, default=default.jobs_per_s, metavar="R", help="jobs per second")
    add("--kv-tokens", type=count, default=default.kv_tokens, metavar="N", help="room for KV")
    add("--max-turns", type=count, metavar="N", help="first N turns of each job")
    add("--time-scale", type=amount, default=1.0, metavar="X", help="multiply the tool times")
    add("--hidden-size", type=count, default=default.hidden_size, metavar="N", help="of the model")
    add("--layers", type=count, default=default.num_layers, metavar="N", help="of the model")
    add("--profile-seconds", type=positive, default=default.profile_seconds, metavar="S", help="each time")
    given = parser.parse_args(argv)
    config = RealityConfig(
        out=given.out,
        num_jobs=given.jobs,
        seeds=tuple(range(given.seeds)),
        repeats=given.repeats,
        policies=tuple(given.policies),
        jobs_per_s=given.rate,
        kv_tokens=given.kv_tokens,
        max_turns=given.max_turns,
        time_scale=given.time_scale,
        hidden_size=given.hidden_size,
        num_layers=given.layers,
        profile_seconds=given.profile_seconds,
    )
    try:
        with unwound_by_sigterm():
            comparisons = compare(config)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{render(comparisons[-1].profile)}\n\n{report(comparisons)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

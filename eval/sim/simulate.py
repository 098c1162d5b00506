"""``continuum simulate``: jobs under several policies, loads and seeds, on hardware that is not there."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tqdm import tqdm

from engine.config import SchedulerConfig
from eval.arguments import amount, count, numbers, positive, share, whole
from eval.baselines.catalog import parse_policies, parse_policy, policy_names
from eval.baselines.knowledge import NamedPolicy
from eval.errors import EvalError
from eval.html_report import require_plotly, write_html
from eval.metrics import TTFT_LIMIT_S, RunResult, RunSetting, summarise
from eval.report import render
from eval.results import ResultFile, require_writable, write_results
from eval.sim.cost_model import StepCost
from eval.sim.fitted import read_profile
from eval.sim.roofline import make_cost
from eval.sim.router import ROUTERS
from eval.sim.simulator import SimConfig, Simulator
from eval.sim.trace import open_trace
from eval.workloads.arrivals import ARRIVALS, ArrivalKind, Arrivals
from eval.workloads.catalog import Workload, describe, open_workload, short_name
from eval.workloads.sampling import JobLimits

_NOT_ASKED = ("--json", "--html", "--trace", "--processes")
_OF_PRESETS = ("--model", "--gpu", "--tensor-parallel", "--dtype", "--gpu-memory-utilization")
"""Flags that say nothing where a measured profile does."""
DETAIL_SEEDS = 1
"""Of the first seeds of each policy and load what plots need is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What computes: a preset pair, or a profile measured on some machine."""

    model: str
    gpu: str
    tensor_parallel: int | None = None
    dtype: str = "bf16"
    gpu_memory_utilization: float = 0.92
    profile: Path | None = None
    kv_tokens: int | None = None

    def cost(self) -> tuple[StepCost, int]:
        """Step times, and room for KV in tokens."""
        if self.profile is not None:
            fitted = read_profile(self.profile)
            if self.kv_tokens is None:
                raise EvalError("A measured profile does not say how much KV fits: give --kv-tokens.")
            return fitted, self.kv_tokens
        roofline = make_cost(self.model, self.gpu, tensor_parallel=self.tensor_parallel, dtype=self.dtype)
        kv_tokens = self.kv_tokens or roofline.kv_tokens(self.gpu_memory_utilization)
        return roofline, kv_tokens

    def describe(self) -> tuple[str, str]:
        """The model, and what it runs on."""
        if self.profile is not None:
            profile = read_profile(self.profile).profile
            return profile.model, f"{profile.dtype}, step times as measured"
        return self.model, make_cost(
            self.model, self.gpu, tensor_parallel=self.tensor_parallel, dtype=self.dtype
        ).describe().removeprefix(f"{self.model} in ")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationPlan:
    """Everything about a grid of runs but the policy, the load and the seed of each; crosses to processes."""

    workload: str
    num_jobs: int | None
    limits: JobLimits
    arrivals: ArrivalKind
    cv: float = 1.0
    concurrency: int | None = None
    hardware: Hardware
    host_kv_tokens: int = 0
    block_size: int = 16
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_replicas: int = 1
    router: str = "session"
    tell_last_step: bool = False
    share_prefixes: bool = False
    ttft_limit_s: float = TTFT_LIMIT_S
    trace: Path | None = None

    def config(self) -> SimConfig:
        cost, kv_tokens = self.hardware.cost()
        return SimConfig(
            cost=cost,
            kv_tokens=kv_tokens,
            host_kv_tokens=self.host_kv_tokens,
            block_size=self.block_size,
            scheduler=self.scheduler,
            num_replicas=self.num_replicas,
            router=self.router,
            tell_last_step=self.tell_last_step,
            share_prefixes=self.share_prefixes,
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
    """Keep what plots need."""


def simulate_one(plan: SimulationPlan, run: SimulationRun, policy: NamedPolicy | None = None) -> RunResult:
    """One run. The same arguments give the same result, byte for byte.

    ``policy``: in place of the one that the run names.
    """
    config = plan.config()
    model, hardware = plan.hardware.describe()
    sample = _workload(plan.workload).sample(plan.num_jobs, run.seed, plan.limits)
    arrivals = plan.arrivals_at(run.rate_per_s)
    policy = policy or parse_policy(run.policy)
    with closing(open_trace(plan.trace, config, policy.name)) as trace:
        simulator = Simulator(config, policy, sample.jobs, tracer=trace.writer)
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
        num_replicas=plan.num_replicas,
        hardware=hardware,
    )
    return summarise(
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
    """Read once per process."""
    return open_workload(name)


def _notes(plan: SimulationPlan, config: SimConfig) -> list[str]:
    """What of a run is set or assumed rather than measured."""
    notes = [
        *config.cost.notes(),
        f"KV pool: {config.kv_tokens:,} tokens per replica, in blocks of {config.block_size}",
        f"host memory: room for {config.host_kv_tokens:,} tokens of KV; stores are ASSUMED to cost nothing"
        if config.host_kv_tokens
        else "host memory: none",
        "system prompts are shared between jobs"
        if config.share_prefixes
        else "ASSUMED: jobs share no system prompt, unless the recording has block ids across jobs",
        "clients say which turn is a job's last"
        if config.tell_last_step
        else "clients do not say which turn is last",
    ]
    if config.num_replicas > 1:
        notes.append(f"{config.num_replicas} replicas behind a {config.router} router")
    return notes


def simulate(plan: SimulationPlan, runs: Sequence[SimulationRun], num_processes: int) -> list[RunResult]:
    """All runs, in order, with progress on stderr."""
    _workload(plan.workload)  # a bad file is an error before anything starts; forked processes inherit it
    plan.config()
    with tqdm(total=len(runs), unit="run", file=sys.stderr, disable=None, leave=False) as bar:
        results = []
        for result in _results(plan, runs, min(num_processes, len(runs))):
            setting = result.setting
            bar.set_postfix_str(f"{setting.name}, {setting.jobs_per_s or 0:g}/s, seed {setting.seed}")
            bar.update()
            results.append(result)
    return results


def _results(plan: SimulationPlan, runs: Sequence[SimulationRun], num_processes: int) -> Iterator[RunResult]:
    if num_processes <= 1:
        for run in runs:
            yield simulate_one(plan, run)
        return
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(num_processes, context, _begin_worker) as pool:
        try:
            yield from pool.map(simulate_one, [plan] * len(runs), runs)
        except BrokenProcessPool as error:
            raise EvalError(
                "A process that simulated was killed, perhaps for the memory it took: try fewer --processes."
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()  # what it has begun may take minutes, and nobody will look at it
            raise


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent; end with it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def grid(policies: Sequence[str], rates: Sequence[float | None], seeds: Sequence[int]) -> list[SimulationRun]:
    """Every policy at every load with every seed."""
    return [
        SimulationRun(policy, rate, seed, detail=seed in seeds[:DETAIL_SEEDS])
        for rate in rates
        for seed in seeds
        for policy in policies
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum simulate``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "policies:\n" + "\n".join(f"  {syntax:32} {told}" for syntax, told in policy_names())
    _add_workload_flags(parser.add_argument_group("jobs"))
    _add_hardware_flags(parser.add_argument_group("hardware"))
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_output_flags(parser.add_argument_group("runs and results"))


def _add_workload_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--workload",
        required=True,
        metavar="FILE",
        help="any file of jobs, made ones, or a mix A+B: see continuum workload --help",
    )
    add("--jobs", type=count, metavar="N", help="so many jobs, drawn by the seed; all of a file by default")
    add(
        "--rate",
        type=numbers,
        metavar="R[,R...]",
        help="open loop: mean arrivals of jobs per second; several are run one by one",
    )
    add("--arrivals", choices=ARRIVALS, help="poisson with --rate, closed with --concurrency, else at-once")
    add(
        "--burstiness",
        type=positive,
        default=1.0,
        metavar="CV",
        help="of bursty arrivals: sd / mean of the time between two",
    )
    add("--concurrency", type=count, metavar="N", help="closed loop: most jobs at once")
    add("--max-turns", type=count, metavar="N", help="cut jobs to their first N turns")
    add(
        "--max-context-tokens",
        type=count,
        metavar="N",
        help="leave longer jobs out; by default what fits in the pool",
    )
    add("--gap-cap-s", type=amount, default=600.0, metavar="S", help="longest tool time (600)")
    add("--share-prefixes", action="store_true", help="jobs of one agent begin with the same KV blocks")
    add("--tell-last-step", action="store_true", help="clients say which turn is a job's last")


def _add_hardware_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        default="llama-3.1-8b",
        help="llama-3.1-8b (default), llama-3.1-70b, qwen3-30b-a3b, glm-4.5",
    )
    add("--gpu", default="h100", help="a100-80, h100 (default), h200, b200")
    add("--tensor-parallel", type=count, metavar="N", help="GPUs per replica; as few as leave room for KV")
    add("--dtype", default="bf16", help="of the weights: bf16 (default) or fp8")
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="step times measured by continuum profile instead; needs --kv-tokens",
    )
    add(
        "--gpu-memory-utilization",
        type=share,
        default=0.92,
        metavar="X",
        help="share of the GPU for weights and KV (0.92)",
    )
    add(
        "--kv-tokens", type=count, metavar="N", help="KV pool of a replica; by default what the memory leaves"
    )
    add(
        "--host-kv-tokens",
        type=whole,
        default=0,
        metavar="N",
        help="room for copies of KV in the host memory of a replica (0: none)",
    )


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    default = SchedulerConfig()
    add = group.add_argument
    add("--block-size", type=count, default=16, metavar="N", help="tokens per KV block (16)")
    add(
        "--max-num-seqs",
        type=count,
        default=default.max_num_seqs,
        metavar="N",
        help=f"most requests running at once ({default.max_num_seqs})",
    )
    add(
        "--max-num-batched-tokens",
        type=count,
        default=default.max_num_batched_tokens,
        metavar="N",
        help=f"token budget of a step ({default.max_num_batched_tokens})",
    )
    add("--replicas", type=count, default=1, metavar="N", help="engines behind a router")
    add(
        "--router",
        choices=ROUTERS,
        default="session",
        help="which of them serves a turn; session (default): the one that served its job's first",
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--policies",
        default="fcfs,continuum",
        metavar="P[,P...]",
        help="what to compare, the first is the baseline; see below (fcfs,continuum)",
    )
    add("--seeds", type=count, default=1, metavar="K", help="repeat with K seeds of jobs and arrivals (1)")
    add("--first-seed", type=int, default=0, metavar="N", help="seeds are N, N + 1, ... (0)")
    add(
        "--ttft-limit-s",
        type=positive,
        default=TTFT_LIMIT_S,
        metavar="S",
        help="goodput counts turns with no longer TTFT (30)",
    )
    add(
        "--processes",
        type=count,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs side by side; all CPUs",
    )
    add("--json", type=Path, metavar="OUT", help="write the results there, for continuum compare")
    add("--html", type=Path, metavar="OUT.html", help="write a page with tables and plots there")
    add("--trace", type=Path, metavar="OUT", help="write the scheduler trace of a single run there")


def _plan(arguments: argparse.Namespace) -> SimulationPlan:
    _refuse_ignored(arguments)
    hardware = Hardware(
        model=arguments.model,
        gpu=arguments.gpu,
        tensor_parallel=arguments.tensor_parallel,
        dtype=arguments.dtype,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        profile=arguments.profile,
        kv_tokens=arguments.kv_tokens,
    )
    _, kv_tokens = hardware.cost()
    return SimulationPlan(
        workload=arguments.workload,
        num_jobs=arguments.jobs,
        limits=JobLimits(
            max_turns=arguments.max_turns,
            max_context_tokens=arguments.max_context_tokens or kv_tokens - arguments.block_size,
            gap_cap_s=arguments.gap_cap_s,
        ),
        arrivals=_arrival_kind(arguments),
        cv=arguments.burstiness,
        concurrency=arguments.concurrency,
        hardware=hardware,
        host_kv_tokens=arguments.host_kv_tokens,
        block_size=arguments.block_size,
        scheduler=SchedulerConfig(
            max_num_seqs=arguments.max_num_seqs, max_num_batched_tokens=arguments.max_num_batched_tokens
        ),
        num_replicas=arguments.replicas,
        router=arguments.router,
        tell_last_step=arguments.tell_last_step,
        share_prefixes=arguments.share_prefixes,
        ttft_limit_s=arguments.ttft_limit_s,
        trace=arguments.trace,
    )


def _refuse_ignored(arguments: argparse.Namespace) -> None:
    """EvalError if a flag would be without effect."""
    given = {word.partition("=")[0] for word in arguments.given}
    ignored = next((flag for flag in _OF_PRESETS if flag in given), None)
    if arguments.profile is not None and ignored is not None:
        raise EvalError(f"{ignored} means nothing beside --profile: the profile says what computes.")


def _arrival_kind(arguments: argparse.Namespace) -> ArrivalKind:
    if arguments.arrivals is not None:
        return ArrivalKind(arguments.arrivals)
    if arguments.rate is not None:
        return ArrivalKind.POISSON
    return ArrivalKind.AT_ONCE if arguments.concurrency is None else ArrivalKind.CLOSED


def run(arguments: argparse.Namespace) -> int:
    """``continuum simulate``. What cannot be read, or never fits, is raised as one sentence."""
    policies = [policy.name for policy in parse_policies(arguments.policies)]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    rates: Sequence[float | None] = arguments.rate or [None]
    plan = _plan(arguments)
    for rate in rates:
        plan.arrivals_at(rate)  # a combination that means nothing is refused before anything runs
    runs = grid(policies, rates, seeds)
    require_writable(arguments.json, arguments.html)
    if arguments.html:
        require_plotly()
    if plan.trace is not None and len(runs) > 1:
        raise EvalError(f"--trace writes one run, but {len(runs)} were asked for.")
    results = simulate(plan, runs, arguments.processes)
    file = ResultFile(title=_title(arguments), command=asked(arguments), runs=results)
    try:
        if arguments.json:
            write_results(arguments.json, file)
        if arguments.html:
            write_html(arguments.html, [file])
    finally:  # a full disk takes nothing from who has waited
        print(render(results))
    return 0


def _title(arguments: argparse.Namespace) -> str:
    return f"{Path(short_name(arguments.workload)).stem}, simulated"


def asked(arguments: argparse.Namespace) -> str:
    """What was typed, without where the results go: equal questions have equal answers."""
    words = iter(arguments.given)
    kept: list[str] = []
    for word in words:
        name, _, value = word.partition("=")
        if name not in _NOT_ASKED:
            kept.append(word)
        elif not value:
            next(words, None)
    return shlex.join(["continuum", *kept])

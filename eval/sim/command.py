"""``continuum simulate``: its flags, and where its results go."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from engine.config import SchedulerConfig
from eval.arguments import add_processes, amount, count, given_flags, numbers, positive, share, whole
from eval.baselines.catalog import parse_policies, policy_names
from eval.errors import EvalError
from eval.html_report import require_plotly, write_html
from eval.metrics import TTFT_LIMIT_S
from eval.report import render
from eval.results import ResultFile, require_own_files, require_writable, write_results
from eval.sim.router import ROUTERS
from eval.sim.simulate import Hardware, SimulationPlan, grid, simulate
from eval.workloads.arrival_flags import add_arrivals
from eval.workloads.arrivals import ArrivalKind
from eval.workloads.catalog import files_of, short_name
from eval.workloads.sampling import JobLimits

_NOT_ASKED = ("--json", "--html", "--trace", "--processes")
_OF_PRESETS = ("--model", "--gpu", "--tensor-parallel", "--dtype", "--gpu-memory-utilization")
"""Flags that say nothing where a measured profile does."""


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
    add_arrivals(group)
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
    add(
        "--disk-kv-tokens",
        type=whole,
        default=0,
        metavar="N",
        help="room for copies that host memory drops, on the disk of a replica (0: none)",
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
    add_processes(group)
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
        disk_kv_tokens=arguments.disk_kv_tokens,
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
    given = given_flags(arguments)
    ignored = next((flag for flag in _OF_PRESETS if flag in given), None)
    if arguments.profile is not None and ignored is not None:
        raise EvalError(f"{ignored} means nothing beside --profile: the profile says what computes.")
    if arguments.kv_tokens is not None and "--gpu-memory-utilization" in given:
        raise EvalError("--gpu-memory-utilization means nothing beside --kv-tokens: that is the KV pool.")
    if arguments.replicas == 1 and "--router" in given:
        raise EvalError("--router means nothing with one replica: give --replicas.")


def _arrival_kind(arguments: argparse.Namespace) -> ArrivalKind:
    if arguments.arrivals is not None:
        return ArrivalKind(arguments.arrivals)
    if arguments.rate is not None:
        return ArrivalKind.POISSON
    return ArrivalKind.AT_ONCE if arguments.concurrency is None else ArrivalKind.CLOSED


def run(arguments: argparse.Namespace) -> int:
    """``continuum simulate``. What cannot be read, or never fits, is raised as one sentence."""
    _require_own_files(arguments)
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


def _require_own_files(arguments: argparse.Namespace) -> None:
    require_own_files(
        [("--json", arguments.json), ("--html", arguments.html), ("--trace", arguments.trace)],
        [
            *files_of("--workload", arguments.workload),
            ("--profile", arguments.profile),
            *(("--policies", path) for path in _states_of(arguments.policies)),
        ],
    )


def _states_of(policies: str) -> list[Path]:
    """Files of what was learned that policies begin with."""
    options = [part.rpartition(":")[2].partition("=") for part in policies.split(",")]
    return [Path(value) for name, _, value in options if name == "estimator_state"]


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

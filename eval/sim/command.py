"""``continuum simulate``: its flags, and the output of its results."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill

from engine.config.engine_config import SchedulerConfig
from eval.arguments import add_processes, amount, count, given_flags, numbers, positive, share, whole
from eval.baselines.catalog import ablation_names, parse_policies, policy_names
from eval.errors import UsageError
from eval.report.html_report import require_plotly, write_html
from eval.report.metrics import TTFT_LIMIT_S, RunResult
from eval.report.results import ResultFile, require_own_files, require_writable, write_results
from eval.report.slo import slo_argument
from eval.report.tables import render
from eval.sim.agents import FIRST, agents_at_slo
from eval.sim.agents import render as render_agents
from eval.sim.drafts import read_draft_counts
from eval.sim.hardware import GPUS
from eval.sim.models import MODELS
from eval.sim.replicas.make import EXACT, REPLICA_MODELS, check_replica_model
from eval.sim.replicas.router import ROUTERS
from eval.sim.sim_config import KV_TRANSFER_GB_S
from eval.sim.simulate import Hardware, SimulationPlan, grid, simulate
from eval.workloads.arrivals import ArrivalKind
from eval.workloads.catalog import files_of, short_name
from eval.workloads.flags import add_arrivals, add_jobs
from eval.workloads.sampling import JobLimits

HELP_WIDTH = 98
_NOT_ASKED = ("--json", "--html", "--trace", "--processes")
_OF_PRESETS = ("--model", "--gpu", "--tensor-parallel", "--dtype", "--gpu-memory-utilization")
"""Flags that a measured profile makes ineffective."""
_OF_ONE_LOAD = ("--rate", "--arrivals", "--burstiness", "--jobs", "--trace")
"""Flags that a search for a number of agents makes ineffective."""
_OF_PREFILL_REPLICAS = ("--prefill-above", "--kv-transfer-gb-s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum simulate``."""
    parser.usage = "continuum simulate --workload FILE [--flag VALUE ...]"
    parser.epilog = _policies()
    _add_workload_flags(parser.add_argument_group("workload"))
    _add_hardware_flags(parser.add_argument_group("hardware"))
    engine = parser.add_argument_group("engine")
    _add_engine_flags(engine)
    _add_fleet_flags(engine)
    _add_upgrade_flags(engine)
    _add_output_flags(parser.add_argument_group("runs and results"))


def _policies() -> str:
    ablations = ablation_names()
    whole = [(syntax, told) for syntax, told in policy_names() if syntax not in ablations]
    rows = [*whole, ("ablations of continuum", ", ".join(ablations))]
    return "\n".join(["policies:", *(_row(syntax, told) for syntax, told in rows)])


def _row(syntax: str, told: str) -> str:
    """Formats two columns and wraps the second."""
    return fill(f"  {syntax:31} {told}", HELP_WIDTH, subsequent_indent=" " * 34, break_on_hyphens=False)


def _add_workload_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add_jobs(group)
    add(
        "--rate",
        type=numbers,
        metavar="R[,R...]",
        help="Open loop: mean arrival rate in jobs per second; several rates are run one after another",
    )
    add_arrivals(group)
    add("--concurrency", type=count, metavar="N", help="Closed loop: number of concurrent jobs")
    add(
        "--max-context-tokens",
        type=count,
        metavar="N",
        help="Leave out jobs with a longer context, in tokens (default: what fits into the KV pool)",
    )
    add("--gap-cap-s", type=amount, default=600.0, metavar="S", help="Cap on a tool time, in seconds")
    add(
        "--share-prefixes",
        action="store_true",
        help="Let jobs with the same system prompt share its KV blocks",
    )
    add("--tell-last-step", action="store_true", help="Let clients announce the last turn of a job")
    add("--tell-parents", action="store_true", help="Let clients name the job that waits for a sub-agent")
    add(
        "--lessons",
        action="store_true",
        help="Let the continuum policy learn from ended jobs how much work others have, as a server does",
    )


def _add_hardware_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--model",
        default="llama-3.1-8b",
        metavar="NAME",
        help=f"Model preset: {', '.join(MODELS)}",
    )
    add("--gpu", default="h100", metavar="NAME", help=f"GPU preset: {', '.join(GPUS)}")
    add(
        "--tensor-parallel",
        type=count,
        metavar="N",
        help="GPUs per replica (default: the fewest whose memory holds weights and KV)",
    )
    add("--dtype", default="bf16", metavar="TYPE", help="Data type of the weights: bf16 or fp8")
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="Use step times measured by continuum profile instead of a preset; needs --kv-tokens",
    )
    add(
        "--gpu-memory-utilization",
        type=share,
        default=0.92,
        metavar="X",
        help="Fraction of the GPU memory for weights and KV cache",
    )
    add(
        "--kv-tokens",
        type=count,
        metavar="N",
        help="KV pool of a replica, in tokens (default: what the memory holds)",
    )
    add(
        "--host-kv-tokens",
        type=whole,
        default=0,
        metavar="N",
        help="Host memory of a replica for offloaded KV, in tokens; 0: no offloading",
    )
    add(
        "--disk-kv-tokens",
        type=whole,
        default=0,
        metavar="N",
        help="Disk of a replica for KV evicted from host memory, in tokens; 0: no disk tier",
    )


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    default = SchedulerConfig()
    add = group.add_argument
    add("--block-size", type=count, default=16, metavar="N", help="KV cache block size in tokens")
    add(
        "--disable-hybrid-kv-cache-manager",
        action="store_true",
        help="For comparison, keep the KV of all tokens in layers with a sliding window, too",
    )
    add(
        "--max-num-seqs",
        type=count,
        default=default.max_num_seqs,
        metavar="N",
        help="Maximum number of running requests",
    )
    add(
        "--max-num-batched-tokens",
        type=count,
        default=default.max_num_batched_tokens,
        metavar="N",
        help="Token budget of a step",
    )
    add(
        "--drafts",
        type=Path,
        metavar="FILE",
        help="Simulate speculative decoding with the accepted drafts of the first drafter in this file, "
        "which make bench-drafts writes (default: none)",
    )


def _add_fleet_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--replicas", type=count, default=1, metavar="N", help="Number of engine replicas behind a router")
    add(
        "--replica-model",
        choices=REPLICA_MODELS,
        default=EXACT,
        help="Simulation of a replica; exact: with the server's scheduler, step by step; coarse: with a few "
        "events per turn, for hundreds of replicas, only with policy fcfs and a model with full attention",
    )
    add(
        "--prefill-replicas",
        type=whole,
        default=0,
        metavar="N",
        help="Number of additional replicas that only compute prompts; the others fetch the KV and decode; "
        "needs --replica-model coarse",
    )
    add(
        "--prefill-above",
        type=whole,
        default=0,
        metavar="N",
        help="Send a prompt to the prefill replicas only if more than N of its tokens are not cached at the "
        "replica that decodes; 0: every prompt",
    )
    add(
        "--kv-transfer-gb-s",
        type=positive,
        default=KV_TRANSFER_GB_S,
        metavar="X",
        help="Bandwidth of these fetches of KV, in GB/s of each replica",
    )
    add(
        "--router",
        choices=ROUTERS,
        default="jobs",
        help="Routing of turns to replicas; jobs: as continuum serve does, session: to the replica of the "
        "job's first turn, prefix: by a hash of the prompt's beginning",
    )


def _add_upgrade_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--upgrade-s",
        type=positive,
        metavar="SECONDS",
        help="Replace the replicas one after another, each in this time (default: no upgrade)",
    )
    group.add_argument(
        "--no-handover",
        action="store_true",
        help="A replaced replica loses the KV of its paused jobs instead of handing it over",
    )


def _add_output_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--policies",
        default="fcfs,continuum",
        metavar="P[,P...]",
        help="Policies to compare, the baseline first; see below",
    )
    add(
        "--seeds",
        type=count,
        default=1,
        metavar="K",
        help="Number of repetitions, each with another seed of jobs and arrivals",
    )
    add(
        "--slo",
        type=slo_argument,
        metavar="NAME=TIME[,...]",
        help="Find the most agents at once with which p95 of these times keeps its bound: first (TTFT of "
        "first turns, --ttft-limit-s unless given), return (TTFT of returning turns), tpot (time per output "
        "token), such as return=2,tpot=50ms; each agent runs three jobs, and --concurrency is tried first",
    )
    add("--first-seed", type=int, default=0, metavar="N", help="First of these seeds")
    add(
        "--ttft-limit-s",
        type=positive,
        default=TTFT_LIMIT_S,
        metavar="S",
        help="TTFT limit of turns that count as goodput, in seconds",
    )
    add_processes(group)
    add("--json", type=Path, metavar="OUT", help="Write the results to this file, for continuum compare")
    add("--html", type=Path, metavar="OUT.html", help="Write an HTML report with tables and plots")
    add("--trace", type=Path, metavar="OUT", help="Write the scheduler trace; single runs only")


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
        hybrid_kv_cache=not arguments.disable_hybrid_kv_cache_manager,
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
        replica_model=arguments.replica_model,
        num_prefill_replicas=arguments.prefill_replicas,
        prefill_above=arguments.prefill_above,
        kv_transfer_gb_s=arguments.kv_transfer_gb_s,
        router=arguments.router,
        upgrade_s=arguments.upgrade_s,
        upgrade_hands_over=not arguments.no_handover,
        tell_last_step=arguments.tell_last_step,
        tell_parents=arguments.tell_parents,
        lessons=arguments.lessons,
        share_prefixes=arguments.share_prefixes,
        ttft_limit_s=arguments.ttft_limit_s,
        trace=arguments.trace,
        drafts=None if arguments.drafts is None else read_draft_counts(arguments.drafts),
    )


def _refuse_ignored(arguments: argparse.Namespace) -> None:
    """Raises UsageError if a flag would have no effect."""
    given = given_flags(arguments)
    ignored = next((flag for flag in _OF_PRESETS if flag in given), None)
    if arguments.profile is not None and ignored is not None:
        raise UsageError(f"{ignored} has no effect with --profile, which determines the hardware.")
    if arguments.kv_tokens is not None and "--gpu-memory-utilization" in given:
        raise UsageError("--gpu-memory-utilization has no effect with --kv-tokens, which sizes the KV pool.")
    ignored = next((flag for flag in _OF_PREFILL_REPLICAS if flag in given), None)
    fetches = arguments.prefill_replicas or arguments.upgrade_s is not None
    if not fetches and ignored is not None:
        raise UsageError(f"{ignored} has no effect without --prefill-replicas.")
    if arguments.upgrade_s is None and arguments.no_handover:
        raise UsageError("--no-handover has no effect without --upgrade-s.")
    if arguments.replicas + arguments.prefill_replicas == 1 and "--router" in given:
        raise UsageError("--router has no effect with one replica: set --replicas.")


def _arrival_kind(arguments: argparse.Namespace) -> ArrivalKind:
    if arguments.arrivals is not None:
        return ArrivalKind(arguments.arrivals)
    if arguments.rate is not None:
        return ArrivalKind.POISSON
    return ArrivalKind.AT_ONCE if arguments.concurrency is None else ArrivalKind.CLOSED


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum simulate``. Raises one sentence for what cannot be read or never fits."""
    _require_own_files(arguments)
    policies = [policy.name for policy in parse_policies(arguments.policies)]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    plan = _plan(arguments)
    require_writable(arguments.json, arguments.html)
    if arguments.html:
        require_plotly()
    if arguments.slo is not None:
        return _search(arguments, plan, policies, seeds)
    rates: Sequence[float | None] = arguments.rate or [None]
    for rate in rates:
        plan.arrivals_at(rate)  # refuses an invalid combination before anything runs
    runs = grid(policies, rates, seeds)
    if plan.trace is not None and len(runs) > 1:
        raise UsageError(f"--trace records a single run, but {len(runs)} were requested.")
    results = simulate(plan, runs, arguments.processes)
    _report(arguments, results, render(results))
    return 0


def _search(
    arguments: argparse.Namespace, plan: SimulationPlan, policies: Sequence[str], seeds: Sequence[int]
) -> int:
    """Finds the most agents that keep ``--slo``, for each policy."""
    for flag in _OF_ONE_LOAD:
        if flag in given_flags(arguments):
            raise UsageError(f"{flag} has no effect with --slo, which searches for a number of agents.")
    plan = replace(plan, arrivals=ArrivalKind.CLOSED)
    for policy in parse_policies(arguments.policies):
        check_replica_model(plan.config(), policy)  # before a search of minutes
    objective = arguments.slo.with_first(arguments.ttft_limit_s)
    first = arguments.concurrency or FIRST
    found = [agents_at_slo(plan, policy, objective, first, seeds, arguments.processes) for policy in policies]
    results = [run for each in found for runs in each.tried.values() for run in runs]
    _report(arguments, results, render_agents(found, objective))
    return 0


def _report(arguments: argparse.Namespace, results: list[RunResult], text: str) -> None:
    """Writes the files, and prints the text."""
    file = ResultFile(title=_title(arguments), command=asked(arguments), runs=results)
    try:
        if arguments.json:
            write_results(arguments.json, file)
        if arguments.html:
            write_html(arguments.html, [file])
    finally:  # print the report even if the disk is full
        print(text)


def _require_own_files(arguments: argparse.Namespace) -> None:
    require_own_files(
        [("--json", arguments.json), ("--html", arguments.html), ("--trace", arguments.trace)],
        [
            *files_of("--workload", arguments.workload),
            ("--profile", arguments.profile),
            ("--drafts", arguments.drafts),
            *(("--policies", path) for path in _states_of(arguments.policies)),
        ],
    )


def _states_of(policies: str) -> list[Path]:
    """Returns the files of learned state that policies start with."""
    options = [part.rpartition(":")[2].partition("=") for part in policies.split(",")]
    return [Path(value) for name, _, value in options if name == "estimator_state"]


def _title(arguments: argparse.Namespace) -> str:
    return f"{Path(short_name(arguments.workload)).stem}, simulated"


def asked(arguments: argparse.Namespace) -> str:
    """Returns the command line without output paths: equal simulations have equal lines."""
    words = iter(arguments.given)
    kept: list[str] = []
    for word in words:
        name, _, value = word.partition("=")
        if name not in _NOT_ASKED:
            kept.append(word)
        elif not value:
            next(words, None)
    return shlex.join(["continuum", *kept])

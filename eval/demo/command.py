"""``continuum demo``: the same work under two policies on this machine, with little KV memory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from eval.agents import live_demo
from eval.agents.live_demo import LiveDemo, run_live_demo
from eval.arguments import amount, count, positive
from eval.demo.replay_demo import ReplayDemo, quick, run_replay_demo
from eval.errors import UsageError
from eval.load.bench import report_errors
from eval.load.bench_run import BenchRun
from eval.load.server_process import unwound_by_sigterm
from eval.report.results import require_folder
from eval.report.tables import render
from eval.workloads.catalog import files_of

REPEAT = "repeat-"
_LIVE_FLAGS = ("model", "tasks", "agents", "page_lines")
_REPLAY_FLAGS = ("jobs", "max_turns", "max_context_tokens", "hidden_size", "layers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum demo``."""
    parser.usage = "continuum demo [--flag VALUE ...]"
    live = LiveDemo()
    replay = ReplayDemo()
    add = parser.add_argument
    add(
        "--workload",
        metavar="FILE",
        help="Replay this workload instead of running live agents: a file, or 'synthetic'",
    )
    add("--quick", action="store_true", help="Quick look, half a minute: too few jobs for reliable numbers")
    add(
        "--seed",
        type=int,
        metavar="K",
        help="Random seed of tasks, synthetic jobs, or the sample of a file (default: 0; a file's order)",
    )
    add("--policies", nargs="+", metavar="P", help="Scheduling policies to compare (default: fcfs continuum)")
    add(
        "--repeats",
        type=count,
        default=1,
        metavar="N",
        help="Number of repetitions, each with the next seed, for confidence intervals",
    )
    add(
        "--pool-share",
        type=positive,
        default=live.pool_share,
        metavar="X",
        help="KV pool size as a fraction of all concurrent contexts",
    )
    add("--time-scale", type=amount, default=1.0, metavar="X", help="Factor on the tool times")
    add("--out", type=Path, default=live.out, metavar="FOLDER", help="Folder for traces, records and results")
    agents = parser.add_argument_group("live agents")
    agents.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="Model of the agents (default: the bundled demo model)",
    )
    agents.add_argument(
        "--tasks", type=count, metavar="N", help=f"Total number of tasks (default: {live.num_tasks})"
    )
    agents.add_argument(
        "--agents", type=count, metavar="N", help=f"Number of concurrent agents (default: {live.agents})"
    )
    agents.add_argument(
        "--page-lines",
        type=count,
        metavar="N",
        help=f"Lines of the page that each task reads into its context (default: {live.page_lines})",
    )
    jobs = parser.add_argument_group("replayed jobs (with --workload)")
    jobs.add_argument(
        "--jobs",
        type=count,
        metavar="N",
        help=f"Number of jobs, all started at once (default: {replay.num_jobs})",
    )
    jobs.add_argument(
        "--max-turns",
        type=count,
        metavar="N",
        help="Replay only the first N turns of each job (default: all)",
    )
    jobs.add_argument(
        "--max-context-tokens",
        type=count,
        metavar="N",
        help=f"Cut jobs at this context length, in tokens (default: {replay.max_context_tokens})",
    )
    jobs.add_argument(
        "--hidden-size",
        type=count,
        metavar="N",
        help=f"Hidden size of the random model (default: {replay.hidden_size})",
    )
    jobs.add_argument(
        "--layers", type=count, metavar="N", help=f"Layers of the random model (default: {replay.num_layers})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum demo``. Exit code 1 if a turn failed; raises if something cannot be started."""
    _refuse_twice(arguments.policies or ())
    if arguments.workload is not None:
        _refuse_own_output(arguments.workload, arguments.out)
    require_folder(arguments.out)
    started = time.monotonic()
    runs: list[BenchRun] = []
    with unwound_by_sigterm():
        for number in range(arguments.repeats):
            one = _repeat(arguments, number) if arguments.repeats > 1 else arguments
            runs += _live(one) if one.workload is None else _replay(one)
    print(f"\n{render([run.result for run in runs])}\n")
    for policy in dict.fromkeys(run.result.name for run in runs):
        folders = f"{REPEAT}*/{policy}" if arguments.repeats > 1 else policy
        print(f"{policy}: trace, records and log in {arguments.out / folders}")
    print(f"{time.monotonic() - started:.0f} s in all")
    return max(report_errors(run) for run in runs)


def _refuse_twice(policies: Sequence[str]) -> None:
    """Raises UsageError for a policy that is named twice: each has a folder by its name."""
    for name in policies:
        if policies.count(name) > 1:
            raise UsageError(f"Policy {name} is named twice.")


def _refuse_own_output(workload: str, out: Path) -> None:
    """UsageError for a workload in the output folder, where it could be overwritten before it is read."""
    for option, file in files_of("--workload", workload):
        if file.resolve().is_relative_to(out.resolve()):
            raise UsageError(f"{option} {file} is in the folder of --out, where it could be overwritten.")


def _repeat(arguments: argparse.Namespace, number: int) -> argparse.Namespace:
    """The options of one repetition; every second one reverses the policies, so that drift favors none."""
    policies = list(arguments.policies or LiveDemo().policies)
    changed = {
        "seed": (arguments.seed or 0) + number,
        "out": arguments.out / f"{REPEAT}{number + 1}",
        "policies": policies[::-1] if number % 2 else policies,
    }
    return argparse.Namespace(**{**vars(arguments), **changed})


def _live(arguments: argparse.Namespace) -> list[BenchRun]:
    _refuse(arguments, _REPLAY_FLAGS, "needs --workload: it is for replayed jobs")
    default = LiveDemo()
    config = LiveDemo(
        out=arguments.out,
        policies=tuple(arguments.policies or default.policies),
        model=arguments.model,
        num_tasks=arguments.tasks or default.num_tasks,
        agents=arguments.agents or default.agents,
        page_lines=arguments.page_lines or default.page_lines,
        seed=arguments.seed or 0,
        pool_share=arguments.pool_share,
        time_scale=arguments.time_scale,
    )
    return run_live_demo(live_demo.quick(config) if arguments.quick else config)


def _replay(arguments: argparse.Namespace) -> list[BenchRun]:
    _refuse(arguments, _LIVE_FLAGS, "is for live agents, but --workload replays jobs")
    default = ReplayDemo()
    config = ReplayDemo(
        out=arguments.out,
        policies=tuple(arguments.policies or default.policies),
        workload=arguments.workload,
        num_jobs=arguments.jobs or default.num_jobs,
        seed=arguments.seed,
        max_turns=arguments.max_turns,
        max_context_tokens=arguments.max_context_tokens or default.max_context_tokens,
        pool_share=arguments.pool_share,
        hidden_size=arguments.hidden_size or default.hidden_size,
        num_layers=arguments.layers or default.num_layers,
        time_scale=arguments.time_scale,
    )
    return run_replay_demo(quick(config) if arguments.quick else config)


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """Raises UsageError for an option that would be ignored."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')} {why}.")

"""``continuum demo``: the same work under two policies, side by side, on this machine, KV memory scarce."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from eval.agents import live_demo
from eval.agents.live_demo import LiveDemo, run_live_demo
from eval.arguments import amount, count, positive
from eval.bench import report_errors
from eval.bench_run import BenchRun
from eval.errors import EvalError
from eval.replay_demo import ReplayDemo, quick, run_replay_demo
from eval.report import render
from eval.results import require_folder
from eval.server_process import unwound_by_sigterm
from eval.workloads.catalog import files_of

REPEAT = "repeat-"
_LIVE_FLAGS = ("model", "tasks", "agents", "page_lines")
_REPLAY_FLAGS = ("jobs", "max_turns", "max_context_tokens", "hidden_size", "layers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum demo``."""
    live, replay = LiveDemo(), ReplayDemo()
    add = parser.add_argument
    add(
        "--workload",
        metavar="FILE",
        help="replay jobs instead of letting agents work: recorded ones, or made ones with 'synthetic'",
    )
    add("--quick", action="store_true", help="half a minute: less work; its numbers say little")
    add("--seed", type=int, metavar="K", help="of tasks or made jobs; with a file, draw its jobs at random")
    add("--policies", nargs="+", metavar="P", help="as of continuum serve; fcfs continuum by default")
    add(
        "--repeats",
        type=count,
        default=1,
        metavar="N",
        help="do it all so many times, with the next seed each, in turns: for ratios with an interval",
    )
    add(
        "--pool-share",
        type=positive,
        default=live.pool_share,
        metavar="X",
        help="KV pool as a share of all contexts that are there at once",
    )
    add("--time-scale", type=amount, default=1.0, metavar="X", help="multiply the tool times")
    add("--out", type=Path, default=live.out, metavar="FOLDER", help="traces, records and results")
    agents = parser.add_argument_group("live agents")
    agents.add_argument(
        "--model",
        type=Path,
        metavar="FOLDER",
        help="what they think with; the model that comes along by default",
    )
    agents.add_argument("--tasks", type=count, metavar="N", help=f"in all; {live.num_tasks} by default")
    agents.add_argument("--agents", type=count, metavar="N", help=f"at once; {live.agents} by default")
    agents.add_argument(
        "--page-lines",
        type=count,
        metavar="N",
        help=f"of what each task reads early and carries along; {live.page_lines} by default",
    )
    jobs = parser.add_argument_group("replayed jobs (with --workload)")
    jobs.add_argument(
        "--jobs", type=count, metavar="N", help=f"all started at once; {replay.num_jobs} by default"
    )
    jobs.add_argument("--max-turns", type=count, metavar="N", help="first N turns of each job")
    jobs.add_argument(
        "--max-context-tokens",
        type=count,
        metavar="N",
        help=f"cut jobs there; {replay.max_context_tokens} by default",
    )
    jobs.add_argument(
        "--hidden-size", type=count, metavar="N", help=f"of the model; {replay.hidden_size} by default"
    )
    jobs.add_argument(
        "--layers", type=count, metavar="N", help=f"of the model; {replay.num_layers} by default"
    )


def run(arguments: argparse.Namespace) -> int:
    """``continuum demo``. Exit code 1 if a turn failed; what cannot be started is raised."""
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
    """Each has a folder by its name."""
    for name in policies:
        if policies.count(name) > 1:
            raise EvalError(f"The policy {name} is named twice.")


def _refuse_own_output(workload: str, out: Path) -> None:
    """What an earlier demo left in this folder is written anew before it would be read."""
    for option, file in files_of("--workload", workload):
        if file.resolve().is_relative_to(out.resolve()):
            raise EvalError(f"{option} {file} lies in the folder of --out, where it may be written over.")


def _repeat(arguments: argparse.Namespace, number: int) -> argparse.Namespace:
    """Every other one has the policies the other way round: what drifts on the machine favours nobody."""
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
    _refuse(arguments, _LIVE_FLAGS, "is for live agents; --workload replays jobs")
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
    """An option that would be ignored is an error."""
    for name in names:
        if getattr(arguments, name) is not None:
            raise EvalError(f"--{name.replace('_', '-')} {why}.")

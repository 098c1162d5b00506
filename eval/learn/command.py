"""``continuum learn``: learns from recorded jobs or traces; a server starts with the result by
``--estimator-state``."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from continuum.learning.tool_stats import ToolStats
from continuum.tuning import Tuning
from engine.process.spawn import spawn_command, spawn_input
from estimator.learned.call_history import PastCall
from estimator.learned.duration_model import DurationModel
from estimator.learned.duration_trainer import MIN_CALLS
from estimator.learned.job_history import PastJob
from estimator.learned.models import Model, decode_model
from estimator.learned.work_model import WorkModel
from estimator.learned.work_trainer import MIN_JOBS
from estimator.state import write_state
from eval.arguments import count
from eval.errors import EvalError, ResultError
from eval.learn.past_calls import past_calls
from eval.learn.past_jobs import learn_tools, past_jobs
from eval.report.results import require_own_files, require_writable
from eval.workloads.catalog import files_of, open_workload
from eval.workloads.command import add_limits, limits_from

TRAINER = "estimator.learned.trainer"
EPILOG = """\
What is learned: how long calls of each kind of tool take, what follows a turn, and, with scikit-learn,
two models: of the work that a job still has, and of corrections of those durations. A server that starts
with the file uses a model while its predictions are better than those without it:

  continuum learn trace.jsonl.zst --out learned.json
  continuum serve MODEL --estimator-state learned.json

The file is the one that --estimator-state keeps across restarts, so a server goes on learning in it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum learn``."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add(
        "sources",
        nargs="+",
        metavar="TRACE|WORKLOAD",
        help="Scheduler traces, recorded jobs, or bench records; see continuum workload --help",
    )
    add("--out", type=Path, required=True, metavar="FILE", help="Write what was learned to this file")
    add("--jobs", type=count, metavar="N", help="Number of jobs of each source (default: all)")
    add_limits(parser)


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum learn``. Exit code 1 if there is nothing to learn from."""
    files = [file for source in arguments.sources for file in files_of("TRACE|WORKLOAD", source)]
    require_own_files([("--out", arguments.out)], files)
    require_writable(arguments.out)
    stats = ToolStats(Tuning())
    num_gaps = 0
    past = list[PastJob]()
    calls = list[PastCall]()
    for source in arguments.sources:
        jobs = open_workload(source).sample(arguments.jobs, None, limits_from(arguments)).jobs
        past += past_jobs(jobs)
        calls += past_calls(jobs)
        num_gaps += learn_tools(stats, jobs)
    work = _train(past, "jobs")
    durations = _train(calls, "calls")
    assert not isinstance(work, DurationModel)
    assert not isinstance(durations, WorkModel)
    if work is not None:
        stats.work_model = work
    if durations is not None:
        stats.duration_model = durations
    state = stats.state()
    if state is None:
        raise EvalError("There is nothing to learn: no job has a turn that called a tool or ended.")
    _write(arguments.out, state)
    print(_told(past, num_gaps, work, durations))
    return 0


def _train(past: Sequence[PastJob] | Sequence[PastCall], what: str) -> Model | None:
    """Trains in a separate process, as a server does."""
    print(f"learn: fitting a model of {len(past):,} {what}", file=sys.stderr, flush=True)
    lesson = spawn_input(msgspec.msgpack.encode(past))
    done = subprocess.run(spawn_command(TRAINER), input=lesson, capture_output=True, check=False)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").splitlines()
        raise EvalError(f"The trainer failed: {lines[-1] if lines else f'exit code {done.returncode}'}.")
    return decode_model(done.stdout) if done.stdout else None


def _write(path: Path, state: str) -> None:
    try:
        write_state(state.encode(), path)
    except OSError as error:
        raise ResultError(f"Cannot write {path}: {error.strerror}.") from error


def _told(
    past: Sequence[PastJob], num_gaps: int, model: WorkModel | None, durations: DurationModel | None
) -> str:
    lines = [f"learned from {len(past):,} jobs: {num_gaps:,} tool times"]
    if model is None:
        lines.append(f"no model of remaining work: that takes {MIN_JOBS} jobs")
    else:
        lines.append(
            f"remaining work: of pairs of held-out jobs, the model orders {model.right:.1%} correctly "
            f"(by age {model.right_by_age:.1%})"
        )
    if durations is None:
        lines.append(f"no correction of durations: that takes {MIN_CALLS} of them")
    else:
        share = durations.loss / durations.loss_without if durations.loss_without else 1.0
        lines.append(
            f"durations: for held-out calls, the loss in ln s is {share:.3f} of the loss without the "
            "correction"
        )
    return "\n".join(lines)

"""Evaluates predictions of tool calls and turns on recorded jobs (``make bench-estimator``)."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.estimate.evaluation import Evaluation, evaluate
from benchmarks.estimate.table import render
from engine.errors import EngineError
from eval.arguments import count
from eval.errors import ResultError, UsageError
from eval.learn.calls import played
from eval.report.results import require_own_files, require_writable
from eval.workloads.catalog import RecordedWorkload, Workload, describe, files_of, open_workload
from eval.workloads.command import add_limits, limits_from
from eval.workloads.families import roots
from eval.workloads.sampling import JobLimits, Sample

NUM_FOLDS = 10
EPILOG = """\
Cross-validation: groups of jobs (runs of one task) are split into folds. The jobs of each fold are
held out once and predicted by what was learned from the others; within a job, each call is predicted
before its time is known. A second pass trains on jobs that still run, so some calls are censored. A
third starts empty and learns from all jobs in the order of time.

Every method predicts 19 quantiles per call. pinball: the mean pinball loss of the quantiles 0.1, 0.5,
0.9 and 0.95, in seconds (log: of log seconds). off: the mean calibration error of all 19 quantiles,
in percent, over all calls or within each program. Intervals: 95 %, bootstrapped by group.

Exit code 1: the file has no tool times. The notes below the tables say which times were measured and
which were assumed by the makers of the file.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns its exit code. An error is one sentence on stderr."""
    given = sys.argv[1:] if argv is None else argv
    try:
        return run(_parser().parse_args(given), shlex.join(["python", "-m", "benchmarks.estimate", *given]))
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.estimate",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--workload",
        required=True,
        metavar="FILE",
        help="File of jobs with tool times: recorded jobs, a scheduler trace, or bench records",
    )
    add(
        "--json",
        type=Path,
        metavar="OUT",
        help="Write the full evaluation to this file: every quantile, every program",
    )
    add("--jobs", type=count, metavar="N", help="Number of jobs, the first of the file (default: all)")
    add_limits(parser)
    add(
        "--folds",
        type=_folds,
        default=NUM_FOLDS,
        metavar="K",
        help="Number of cross-validation folds",
    )
    add("--seed", type=int, default=0, metavar="K", help="Random seed of folds and bootstrap")
    add(
        "--learned",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Also learn a correction of the estimator, which takes up to minutes",
    )
    return parser


def _folds(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, got {value}")
    return value


def run(arguments: argparse.Namespace, command: str) -> int:
    """Evaluates; prints the report and writes the file that the arguments name."""
    require_own_files([("--json", arguments.json)], files_of("--workload", arguments.workload))
    require_writable(arguments.json)
    opened = open_workload(arguments.workload)
    sample = _sample(opened, arguments.jobs, limits_from(arguments))
    notes = [*sample.notes, *describe(sample.jobs)]
    evaluation = evaluate(
        opened.name,
        played(sample.jobs),
        notes,
        num_folds=arguments.folds,
        seed=arguments.seed,
        learned=arguments.learned,
        command=command,
        tell=_tell,
    )
    try:
        if arguments.json is not None:
            _write(arguments.json, evaluation)
    finally:  # print the report even if the disk is full
        print(render(evaluation))
    return 0


def _sample(opened: Workload, num_jobs: int | None, limits: JobLimits) -> Sample:
    """Returns the first jobs, without repeats: a copy would be predicted from its original."""
    if num_jobs is not None and isinstance(opened, RecordedWorkload):
        held = len(roots(opened.sample(None, None, limits).jobs))
        if num_jobs > held:
            raise UsageError(f"--jobs asks for {num_jobs} jobs, but {opened.name} holds {held}.")
    return opened.sample(num_jobs, None, limits)


def _tell(what: str) -> None:
    print(f"estimate: {what}", file=sys.stderr, flush=True)


def _write(path: Path, evaluation: Evaluation) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(evaluation)) + b"\n")
    except OSError as error:
        raise ResultError(f"Cannot write the evaluation {path}: {error.strerror}.") from error

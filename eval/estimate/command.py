"""``continuum estimate``: how well tool calls and turns are foretold, on recorded jobs with tool times."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from eval.arguments import count
from eval.errors import EvalError, ResultError, WorkloadError
from eval.estimate import boosting
from eval.estimate.calls import played
from eval.estimate.evaluation import Evaluation, evaluate
from eval.estimate.table import render
from eval.results import require_own_files, require_writable
from eval.sim.command import asked
from eval.workloads.catalog import RecordedWorkload, Workload, describe, files_of, open_workload
from eval.workloads.command import add_limits, limits_from
from eval.workloads.families import roots
from eval.workloads.sampling import JobLimits, Sample

NUM_FOLDS = 10
EPILOG = """\
The groups of jobs (runs of one task) are dealt into folds; each fold's jobs are held out once, and are
foretold by what was learned from the other folds. Within a held-out job its calls come in their order: each
is foretold before it is known. A second round meets the other jobs while they run, so that some calls are
known only to have lasted so long; a third begins with nothing and follows all jobs as time goes.

For each call every way tells 19 quantiles. pinball: the loss that the true quantile keeps least, in seconds
(log: of the logarithm), the mean over the quantiles 0.1, 0.5, 0.9 and 0.95. off: the mean of
|share of calls that ended by a quantile - its level| over all 19, of all calls together or within each
program: what always gives the same quantiles is right on the whole and wrong for each program. Shares are in
percent. Intervals: 95 %, by resampling groups.

The command fails with exit code 1 where a file tells no tool call's time. How much of the times is measured
and how much the file's makers assumed is said below the tables.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum estimate``."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add = parser.add_argument
    add(
        "--workload",
        required=True,
        metavar="FILE",
        help="any file of jobs with tool times: recorded jobs, a scheduler trace, records of bench",
    )
    add("--json", type=Path, metavar="OUT", help="write all figures there: every level, every program")
    add("--jobs", type=count, metavar="N", help="the first N jobs of the file; all by default")
    add_limits(parser)
    add(
        "--folds",
        type=_folds,
        default=NUM_FOLDS,
        metavar="K",
        help=f"parts that are held out in turn ({NUM_FOLDS})",
    )
    add("--seed", type=int, default=0, metavar="K", help="of the folds and of the resampling (0)")
    add(
        "--regressor",
        action=argparse.BooleanOptionalAction,
        help="also fit a regressor (scikit-learn, tens of seconds); by default where it is installed",
    )


def _folds(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, got {value}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """``continuum estimate``. What cannot be read or foretold is one sentence."""
    require_own_files([("--json", arguments.json)], files_of("--workload", arguments.workload))
    require_writable(arguments.json)
    installed = boosting.is_installed()
    if arguments.regressor and not installed:
        raise EvalError("--regressor needs scikit-learn, which is not installed: pip install scikit-learn.")
    opened = open_workload(arguments.workload)
    sample = _sample(opened, arguments.jobs, limits_from(arguments))
    notes = [*sample.notes, *describe(sample.jobs)]
    if not installed:
        notes.append("no regressor was fitted: scikit-learn is not installed")
    evaluation = evaluate(
        opened.name,
        played(sample.jobs),
        notes,
        num_folds=arguments.folds,
        seed=arguments.seed,
        regressor=installed if arguments.regressor is None else arguments.regressor,
        command=asked(arguments),
        tell=_tell,
    )
    try:
        if arguments.json is not None:
            _write(arguments.json, evaluation)
    finally:  # a full disk does not cost what was found
        print(render(evaluation))
    return 0


def _sample(opened: Workload, num_jobs: int | None, limits: JobLimits) -> Sample:
    """The first jobs, never more than there are: a copy would be foretold by its original."""
    if num_jobs is not None and isinstance(opened, RecordedWorkload):
        held = len(roots(opened.sample(None, None, limits).jobs))
        if num_jobs > held:
            raise WorkloadError(f"--jobs asks for {num_jobs} jobs, but {opened.name} holds {held}.")
    return opened.sample(num_jobs, None, limits)


def _tell(what: str) -> None:
    print(f"estimate: {what}", file=sys.stderr, flush=True)


def _write(path: Path, evaluation: Evaluation) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(evaluation)) + b"\n")
    except OSError as error:
        raise ResultError(f"Cannot write the evaluation {path}: {error.strerror}.") from error

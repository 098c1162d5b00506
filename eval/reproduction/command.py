"""``continuum reproduce``: simulates the Continuum paper's settings and compares the multiples."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from eval.arguments import add_processes, count
from eval.errors import UsageError
from eval.report.results import ResultFile, require_folder, require_own_files, require_writable, write_results
from eval.reproduction.experiment import PRESSURE_SHARE, Experiment, Point
from eval.reproduction.published import FIGURES, LEFT_OUT, PaperFigure
from eval.reproduction.table import bullets, figure_table, summary
from eval.sim.command import asked

NUM_JOBS = 100
"""The paper had this many traces of each kind; it does not say how many ran per point."""
NUM_SEEDS = 3
QUICK_JOBS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum reproduce``."""
    parser.epilog = "figures:\n" + "\n".join(f"  {figure.name:11} {figure.title}" for figure in FIGURES)
    add = parser.add_argument
    add("--only", metavar="F[,F...]", help="Figures to reproduce (default: all)")
    add(
        "--quick",
        action="store_true",
        help=f"Quick look: {QUICK_JOBS} jobs per run, one seed, without Autellix and InferCept",
    )
    add("--jobs", type=count, metavar="N", help=f"Jobs per run (default: {NUM_JOBS})")
    add(
        "--seeds",
        type=count,
        metavar="K",
        help=f"Number of seeds of jobs and arrivals (default: {NUM_SEEDS})",
    )
    add_processes(parser)
    add("--json", type=Path, metavar="OUT", help="Write the results of all runs to this file")
    add("--html", type=Path, metavar="FOLDER", help="Write an HTML report with plots per setting, 5 MB each")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum reproduce``."""
    figures = _chosen(arguments.only)
    require_own_files([("--json", arguments.json), ("--html", arguments.html)])
    require_writable(arguments.json)
    if arguments.html:
        from eval.report.html_report import require_plotly

        require_plotly()
        require_folder(arguments.html)
    num_jobs = arguments.jobs or (QUICK_JOBS if arguments.quick else NUM_JOBS)
    num_seeds = arguments.seeds or (1 if arguments.quick else NUM_SEEDS)
    experiment = Experiment(
        num_jobs, range(num_seeds), arguments.processes, _tell, with_peers=not arguments.quick
    )
    done = []
    for figure in figures:
        points = _points(experiment, figure)
        done.append((figure, points))
        print(figure_table(figure, points), end="\n\n", flush=True)
    print(summary(done))
    print(bullets(_notes(num_jobs, num_seeds)))
    print("Not reproduced here:")
    print(bullets(LEFT_OUT))
    if arguments.json:
        write_results(arguments.json, _result_file(arguments, experiment))
    if arguments.html:
        _write_pages(arguments.html, asked(arguments), done)
    return 0


def _tell(line: str) -> None:
    print(f"running {line}", file=sys.stderr, flush=True)


def _chosen(only: str | None) -> list[PaperFigure]:
    """Returns the named figures, in the order of the paper."""
    if only is None:
        return list(FIGURES)
    names = only.split(",")
    known = [figure.name for figure in FIGURES]
    for name in names:
        if name not in known:
            raise UsageError(f"--only: unknown figure {name!r}; choose from {', '.join(known)}.")
    return [figure for figure in FIGURES if figure.name in names]


def _points(experiment: Experiment, figure: PaperFigure) -> list[Point]:
    return [
        point
        for setting in figure.settings
        for point in experiment.points(setting, needs_pressure=figure.needs_pressure)
    ]


def _notes(num_jobs: int, num_seeds: int) -> list[str]:
    """Returns the notes below the tables."""
    seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds, paired"
    return [
        "multiple: job delay of vLLM, or of fcfs here, over that of the system; above 1 it is faster",
        "≈: read off a plot by eye, within 5 %",
        (
            "reproduced: within 20 % of the published multiple (2 % at low load) and, where that is beyond "
            "5 % of 1, with at least half of its difference from 1, in logarithms"
        ),
        (
            "undecided: not so, but the 95 % interval over seeds contains the published multiple; "
            f"more, less: than published; {seeds}"
        ),
        "by: what a step of the ablation adds to the one before it",
        (
            f"memory is short: fcfs recomputes or loads back {PRESSURE_SHARE:.0%} of all prompt "
            "tokens or more; where it is not, one seed is run, and the first of 2, 4 and 8 times the load at "
            "which it is follows"
        ),
        (
            f"{num_jobs} jobs a run, except in eight-turns (45 s of arrivals): ASSUMED (there were "
            f"{NUM_JOBS} traces of each kind; how many jobs a point has is not published); in an overloaded "
            "queue delays grow with it: compare multiples, not seconds"
        ),
        "host memory: 200 GB per B200 and 100 GB per A100 as published, over the bytes of KV per token",
        (
            "jobs are SYNTHETIC, matched to the published moments; their share of output tokens, all of "
            "OpenHands' figures and step times are ASSUMED or COMPUTED, as continuum simulate reports"
        ),
        "synthetic jobs longer than 128k tokens are kept where they fit the pool",
        (
            "BFCL's jobs were shortened by 0.4; whether the published tokens per job are those before or "
            "after is not said: bfcl takes them as after, bfcl-short as before"
        ),
        "turn scaling: 4.64 times the turns, each so much smaller that contexts stay as they are: ASSUMED",
    ]


def _result_file(arguments: argparse.Namespace, experiment: Experiment) -> ResultFile:
    return ResultFile(
        title="the Continuum paper's settings, simulated",
        command=asked(arguments),
        runs=experiment.results,
    )


def _write_pages(folder: Path, command: str, done: Sequence[tuple[PaperFigure, Sequence[Point]]]) -> None:
    """Writes a page per setting: its policies on one hardware, at all simulated loads."""
    from eval.report.html_report import write_html  # loads the plotting library

    for figure, points in done:
        pages: dict[str, list[Point]] = {}
        for point in points:
            name = f"{figure.name} {point.setting.gpu} {point.setting.model} {point.setting.workload}"
            pages.setdefault(re.sub(r"[^a-z0-9.]+", "-", name), []).append(point)
        for name, shown in pages.items():
            runs = {id(run): run for point in shown for runs in point.runs.values() for run in runs}
            file = ResultFile(
                title=f"{figure.name}: {figure.title}", command=command, runs=list(runs.values())
            )
            write_html(folder / f"{name}.html", [file])

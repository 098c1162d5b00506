"""``continuum compare``: compares results of ``bench`` and ``simulate``."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.errors import ResultError
from eval.report.comparison import Comparison
from eval.report.html_report import write_html
from eval.report.results import read_results, require_own_files
from eval.report.tables import render_comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum compare``."""
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        type=Path,
        metavar="RESULT.json",
        help="Result of bench, simulate or reproduce --json; the first is the baseline",
    )
    add("--html", type=Path, metavar="OUT.html", help="Write an HTML report with tables and plots")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum compare``. Raises ResultError for a file that is not a result."""
    require_own_files([("--html", arguments.html)], [("RESULT.json", path) for path in arguments.files])
    files = [read_results(path) for path in arguments.files]
    empty = next((path for path, file in zip(arguments.files, files, strict=True) if not file.runs), None)
    if empty is not None:
        raise ResultError(f"{empty} holds no runs.")
    names = short_names(arguments.files)
    if arguments.html:
        write_html(arguments.html, files, names)
    print(render_comparison(Comparison(files, names)))
    return 0


def short_names(paths: list[Path]) -> list[str]:
    """Returns the shortest distinct ends of the paths; numbers a path that is given twice."""
    parts = [path.with_suffix("").parts for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{path.stem}, file {number}" for number, path in enumerate(paths, 1)]

"""``continuum trace diff``: compares two traces of the same jobs."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.trace.analysis.commands.opening import count, open_tables, print_json

_ABOUT = """\
Compares traces of the same jobs under two policies, for instance from simulate --trace. Jobs are
matched by their ids. A change is the second trace minus the first; the reason of a job's change is
the part of its time that changed most in the same direction.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum trace diff``."""
    parser.epilog = _ABOUT
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="Trace to compare with")
    add("b", type=Path, metavar="B", help="Trace to compare")
    add("--limit", type=count, default=10, metavar="N", help="Number of gains and of losses to show")
    add("--json", action="store_true", help="Print all figures and jobs as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum trace diff``. TraceError if one of the files is not a trace."""
    with open_tables(arguments.a) as a, open_tables(arguments.b) as b:
        from eval.trace.analysis.trace_diff import compare, render

        diff = compare(a, b)
    if arguments.json:
        print_json(diff)
    else:
        print(render(diff, arguments.limit))
    return 0

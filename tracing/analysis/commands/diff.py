"""``continuum trace diff``: two traces of the same jobs."""

from __future__ import annotations

import argparse
from pathlib import Path

from tracing.analysis.commands.opening import count, open_tables, print_json

_ABOUT = """\
Of the same jobs under two policies, for instance, written by continuum simulate --trace or continuum serve
--trace. Changes are the second less the first. Jobs are the same where their ids are. Why a job gained or
lost: the part of its life that changed most in the same direction.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum trace diff``."""
    parser.epilog = _ABOUT
    add = parser.add_argument
    add("a", type=Path, metavar="A", help="a trace: what is compared with")
    add("b", type=Path, metavar="B", help="a trace: what is compared")
    add("--limit", type=count, default=10, metavar="N", help="gains shown, and losses")
    add("--json", action="store_true", help="print all figures and all jobs as JSON")


def run(arguments: argparse.Namespace) -> int:
    """``continuum trace diff``. TraceError if one of them is no trace."""
    with open_tables(arguments.a) as a, open_tables(arguments.b) as b:
        from tracing.analysis.trace_diff import compare, render

        diff = compare(a, b)
    if arguments.json:
        print_json(diff)
    else:
        print(render(diff, arguments.limit))
    return 0

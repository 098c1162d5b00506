"""``continuum trace pins``: shows whether the pins paid."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.trace.analysis.commands.opening import count, open_tables, print_json

_ABOUT = """\
How pins ended and what they retained; the tokens they saved the turns they were handed over to; per
tool: retention wasted and pins ended too early; and the granted time to live against the actual
tool time. One block-second is one KV block retained for one second.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum trace pins``."""
    parser.epilog = _ABOUT
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="Trace, or its first file if it was rotated")
    add("--limit", type=count, default=15, metavar="N", help="Number of tools to show")
    add("--json", action="store_true", help="Print all figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum trace pins``. TraceError if there is no such trace."""
    with open_tables(arguments.trace) as tables:
        from eval.trace.analysis.pin_study import render, study_pins

        study = study_pins(tables)
    if arguments.json:
        print_json(study)
    else:
        print(render(study, arguments.limit))
    return 0

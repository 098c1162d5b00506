"""``continuum trace pins``: whether they paid."""

from __future__ import annotations

import argparse
from pathlib import Path

from tracing.analysis.commands.opening import count, open_tables, print_json

_ABOUT = """\
How pins ended and what they held; what they spared the turns that took them over; by what had been called:
what was held for nothing and what was let go too early; and the time that was granted against the time that
it took. One block-second is one KV block held for one second.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum trace pins``."""
    parser.epilog = _ABOUT
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="a trace, or the first file of one in parts")
    add("--limit", type=count, default=15, metavar="N", help="kinds of calls shown")
    add("--json", action="store_true", help="print all figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """``continuum trace pins``. TraceError if there is no such trace."""
    with open_tables(arguments.trace) as tables:
        from tracing.analysis.pin_study import render, study_pins

        study = study_pins(tables)
    if arguments.json:
        print_json(study)
    else:
        print(render(study, arguments.limit))
    return 0

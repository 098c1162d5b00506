"""``continuum trace summary``: a whole trace on a screen."""

from __future__ import annotations

import argparse
from pathlib import Path

from tracing.analysis.commands.opening import open_tables, print_json

_ABOUT = """\
Says what the file is and whether it is complete, how much the engine did and how long its queue was, who had
the KV pool, and how the jobs fared. A turn's time is the engine's: the network and the client's own time lie
outside of it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum trace summary``."""
    parser.epilog = _ABOUT
    parser.add_argument("trace", type=Path, metavar="FILE", help="a trace, or the first file of one in parts")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """``continuum trace summary``. TraceError if there is no such trace."""
    with open_tables(arguments.trace, warn=False) as tables:  # the summary says itself what is missing
        from tracing.analysis.summary import render, summarise

        summary = summarise(tables)
    if arguments.json:
        print_json(summary)
    else:
        print(render(summary))
    return 0

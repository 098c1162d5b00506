"""``continuum trace summary``: summarizes a whole trace on one screen."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.trace.analysis.commands.opening import open_tables, print_json

_ABOUT = """\
Shows what the file is and whether it is complete, the engine's throughput and queue, who used the KV
pool, and the jobs' completion times. Times of turns are the engine's, without network and client.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum trace summary``."""
    parser.epilog = _ABOUT
    parser.add_argument("trace", type=Path, metavar="FILE", help="Trace, or its first file if it was rotated")
    parser.add_argument("--json", action="store_true", help="Print the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum trace summary``. TraceError if there is no such trace."""
    with open_tables(arguments.trace, warn=False) as tables:  # the summary itself lists what is missing
        from eval.trace.analysis.summary import render, summarize

        summary = summarize(tables)
    if arguments.json:
        print_json(summary)
    else:
        print(render(summary))
    return 0

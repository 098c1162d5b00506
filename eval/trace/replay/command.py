"""``continuum trace replay``: its flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.errors import TraceFileError
from eval.trace.replay.replay import replay


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``continuum trace replay``."""
    parser.add_argument("trace", type=Path, metavar="FILE", help="a trace that began with its engine")


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if anything was decided otherwise than it had been, or could not be decided again."""
    try:
        result = replay(arguments.trace)
    except OSError as error:
        raise TraceFileError(f"Cannot read the trace {arguments.trace}: {error.strerror}.") from error
    print(result)
    return 0 if result.whole else 1

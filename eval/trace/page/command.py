"""``continuum trace report FILE --out OUT.html``."""

from __future__ import annotations

import argparse
from pathlib import Path

from eval.trace.page.builder import read_page
from eval.trace.page.page import render
from tracing.own_file import shared_file
from tracing.reader import TraceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the trace and the page."""
    parser.add_argument("file", metavar="FILE", type=Path, help="Trace, or any file of a rotated one")
    parser.add_argument(
        "--out",
        metavar="OUT.html",
        type=Path,
        required=True,
        help="HTML page to write; its folder is created if missing",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the page. TraceError if the file is not a readable trace, or the page cannot be written."""
    shared = shared_file([("FILE", arguments.file)], [("--out", arguments.out)])
    if shared is not None:
        raise TraceError(shared)
    try:
        page = read_page(arguments.file)
    except OSError as error:
        raise TraceError(f"Cannot read the trace {arguments.file}: {error.strerror}.") from error
    html = render(page)
    try:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(html, encoding="utf-8")
    except OSError as error:
        raise TraceError(f"Cannot write the report {arguments.out}: {error.strerror}.") from error
    for note in (*page.warnings, *page.notes):
        print(f"note: {note}")
    print(f"{arguments.out}: {len(html) / 1e6:.1f} MB, {len(page.jobs):,} jobs")
    return 0

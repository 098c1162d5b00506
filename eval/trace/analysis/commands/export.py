"""``continuum trace export``: writes a trace in the formats of other programs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from eval.trace.analysis.commands.opening import open_tables, said_in_a_sentence
from eval.trace.analysis.exports.dynamo import DynamoExport
from eval.trace.analysis.exports.export import Export, run_export
from eval.trace.analysis.exports.mooncake import MooncakeExport
from eval.trace.analysis.exports.perfetto import PerfettoExport
from eval.trace.analysis.faults import warn_of_faults
from tracing.events import TraceEvent, TraceHeader
from tracing.header_limits import not_told
from tracing.own_file import shared_file
from tracing.reader import TraceError, read_trace

_FORMS = """\
formats:
  perfetto, chrome   one JSON file for ui.perfetto.dev or chrome://tracing: a process per job with its turns,
                     the calls between them and its pins, and the pool and the queue as counters
  mooncake           a request per line with the ids of its blocks of 512 tokens, sessions named: a workload
                     for continuum bench and simulate
  dynamo             rows of NVIDIA Dynamo's request traces (dynamo.request.trace.v1), with what its replay
                     demands: times, lengths, hashes of blocks, calls
  csv, parquet       a folder with a file for each table: turns, jobs, gaps, pins, spans, steps; or, if OUT
                     ends with .csv or .parquet, the turns alone. Columns: docs/trace-tables.md. In a csv
                     a text that a spreadsheet would take for a formula has an apostrophe before it
"""
LINES: dict[str, Callable[[TextIO], Export]] = {
    "perfetto": PerfettoExport,
    "chrome": PerfettoExport,
    "mooncake": MooncakeExport,
    "dynamo": DynamoExport,
}
OF_BLOCKS = (MooncakeExport, DynamoExport)
"""Formats that name the blocks of prompts."""
TABLES = ("csv", "parquet")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum trace export``."""
    parser.epilog = _FORMS
    add = parser.add_argument
    add("trace", type=Path, metavar="FILE", help="Trace, or its first file if it was rotated")
    add("--format", required=True, choices=[*LINES, *TABLES], help="Output format, see below")
    add("--out", required=True, type=Path, metavar="OUT", help="Output file, or folder of tables")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum trace export``; reports on stderr what it wrote. TraceError if writing failed."""
    if arguments.format in TABLES:
        notes = _export_tables(arguments.trace, arguments.format, arguments.out)
    else:
        notes = _export_lines(arguments.trace, LINES[arguments.format], arguments.out)
    print(f"wrote {arguments.out}: {'; '.join(notes)}", file=sys.stderr)
    return 0


def _export_lines(trace: Path, make: Callable[[TextIO], Export], out: Path) -> list[str]:
    _require_own_files(trace, [out])
    with said_in_a_sentence(trace):
        _check_header(trace, next(read_trace(trace)), make)  # an invalid trace leaves no file
    with said_in_a_sentence(out):
        _make_folder_of(out)
        with open(out, "w", encoding="utf-8") as file:
            export = make(file)
            facts = run_export(trace, export)
    warn_of_faults(trace, facts)
    return export.notes()


def _check_header(trace: Path, header: TraceEvent, make: Callable[[TextIO], Export]) -> None:
    assert isinstance(header, TraceHeader), "the reader has checked it"
    untold = not_told(header, "block_size") if make in OF_BLOCKS else None
    if untold is not None:
        raise TraceError(f"{trace}: {untold}, for blocks to be named")


def _export_tables(trace: Path, form: str, out: Path) -> list[str]:
    _check_place(form, out)
    with open_tables(trace) as tables:
        paths = _paths_of_tables(form, out)
        _require_own_files(trace, list(paths.values()))
        notes = []
        with said_in_a_sentence(out):
            for name, path in paths.items():
                _make_folder_of(path)
                if form == "csv":
                    tables.for_spreadsheets(name).sink_csv(path)
                else:
                    tables.table(name).sink_parquet(path)
                notes.append(f"{tables.num_rows(name):,} {name}")
    return notes


def _make_folder_of(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise TraceError(f"Cannot write {out}: {out.parent} is not a folder") from error


def _is_one_table(form: str, out: Path) -> bool:
    return out.suffix == f".{form}"


def _check_place(form: str, out: Path) -> None:
    """Raises TraceError if tables of this format cannot be written there."""
    if _is_one_table(form, out):
        return
    other = next((each for each in TABLES if _is_one_table(each, out)), None)
    if other is not None:
        raise TraceError(f"--out {out} names a file of --format {other}, but --format is {form}")
    if out.exists() and not out.is_dir():
        raise TraceError(f"Cannot write tables to {out}: it is a file, and they need a folder")


def _paths_of_tables(form: str, out: Path) -> dict[str, Path]:
    """Returns the output paths by table name."""
    from eval.trace.analysis.tables import TABLES as NAMES  # polars is an extra

    return {"turns": out} if _is_one_table(form, out) else {name: out / f"{name}.{form}" for name in NAMES}


def _require_own_files(trace: Path, written: Sequence[Path]) -> None:
    shared = shared_file([("FILE", trace)], [("--out", path) for path in written])
    if shared is not None:
        raise TraceError(shared)

"""Shared by the sub-commands: opening a trace, one-sentence errors, and JSON."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from eval.trace.analysis.faults import warn_of_faults
from eval.trace.analysis.life_reader import LifeSink
from eval.trace.analysis.lives import TraceFacts, read_lives
from tracing.reader import TraceError

if TYPE_CHECKING:
    from pathlib import Path

    from eval.trace.analysis.tables import TraceTables


@contextmanager
def open_tables(path: Path, *, warn: bool = True) -> Iterator[TraceTables]:
    """Yields the tables of a trace. ``warn``: report on stderr what the trace lacks."""
    try:
        from eval.trace.analysis.tables import TraceTables
    except ModuleNotFoundError as error:
        raise TraceError(
            f"This needs {error.name}, which is not installed: pip install 'continuum-engine[trace]'"
        ) from error
    with said_in_a_sentence(path):
        tables = TraceTables.read(path)
    if warn:
        warn_of_faults(path, tables.facts)
    with tables:
        yield tables


def read_into(path: Path, sink: LifeSink) -> TraceFacts:
    """Reads a whole trace; reports on stderr what it lacks."""
    with said_in_a_sentence(path):
        facts = read_lives(path, sink)
    warn_of_faults(path, facts)
    return facts


@contextmanager
def said_in_a_sentence(path: Path) -> Iterator[None]:
    """Turns errors of reading or writing a file into a TraceError that names the file."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise TraceError(f"{error.filename or path}: {error.strerror or error}") from error


def count(text: str) -> int:
    """A whole number, at least 1."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value)).decode())

"""Reads a trace as typed events, from one file or many. It does not know their meaning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from tracing.events import SCHEMA_VERSION, TraceEnd, TraceEvent, TraceGap, TraceHeader
from tracing.header_limits import MAX_SECONDS, beyond_limits
from tracing.line_limits import check_numbers
from tracing.parts import PartReader, ZstdError, find_parts, split_part, traces_in
from tracing.progress import LINES_PER_LOOK, Progress, no_progress, reading
from tracing.versions import READABLE_VERSIONS, Upgrade, upgrade_from

MAX_LINE_BYTES = 256 << 20
"""A longer line is an error, which bounds the memory for any file."""
UNTIMED = (TraceHeader, TraceGap, TraceEnd)
"""Records without a time."""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Exceptions that decoding raises for an invalid line; the last one for deep nesting."""


class TraceError(Exception):
    """The file is not a trace that this version can read; the message names the line."""


@dataclass(slots=True)
class TraceReport:
    """The findings of ``read_trace`` about the trace, complete once the last event has been read."""

    num_events: int = 0
    num_parts: int = 0
    """Number of files it was read from."""
    num_events_before: int = 0
    """Number of events in parts before the first existing one."""
    cut_line: int | None = None
    """Number of the incomplete line at the end of the last file, which is omitted."""
    cut_bytes: int = 0
    """Number of bytes of that file that are lost with it; of a compressed file: those in no whole block."""
    end: TraceEnd | None = None
    """None if the trace was not closed normally."""


class _AnyHeader(msgspec.Struct):
    """The fields that the header has in every version of the schema."""

    type: Literal["header"]
    schema_version: int


@dataclass(frozen=True, slots=True)
class TraceLine:
    """A line of a file, with the names of the current schema."""

    path: Path
    number: int
    """Number of the line, from 1 in each file."""
    content: bytes
    num_bytes: int
    """Length in the file, which differs from that of ``content`` if names have changed."""
    may_be_cut: bool
    """Whether it has no line end, and nothing follows."""

    @property
    def place(self) -> str:
        return f"{self.path}, line {self.number}"

    def upgraded(self, upgrade: Upgrade | None) -> TraceLine:
        return self if upgrade is None else replace(self, content=upgrade(self.content))


def read_trace(
    path: str | Path, report: TraceReport | None = None, *, progress: bool = False
) -> Iterator[TraceEvent]:
    """Yields the events of a trace, header first, in the order in which they were written.

    ``path``: its file, any of its parts, the path of the first part even if that is missing, or a folder with
    one trace. The headers of later parts are omitted. An incomplete last line (the process was killed) is
    omitted and noted in ``report``. TraceError if it is not a trace, OSError if a file cannot be read.
    ``progress``: show progress on a terminal.
    """
    report = TraceReport() if report is None else report
    decoder = msgspec.json.Decoder(TraceEvent)
    for line in trace_lines(path, report, progress=progress):
        try:
            event: TraceEvent = decoder.decode(line.content)
            check_numbers(line.content)
        except UNREADABLE as error:
            if line.may_be_cut:
                note_cut(line, report)
                return
            raise TraceError(f"{line.place}: not a trace event: {error}") from error
        report.num_events += 1
        report.end = event if isinstance(event, TraceEnd) else None
        yield event


def in_order(path: Path, events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """Yields the same events. TraceError if time runs backwards or is not finite."""
    last_s = -MAX_SECONDS
    for number, event in enumerate(events, start=1):
        if not isinstance(event, UNTIMED):
            if not last_s <= event.now <= MAX_SECONDS:
                raise TraceError(
                    f"{path}, event {number:,}: now is {event.now:g}, but must be {last_s:g} to "
                    f"{MAX_SECONDS:g}: continuum trace validate names the lines that are out of order"
                )
            last_s = event.now
        yield event


def note_cut(line: TraceLine, report: TraceReport) -> None:
    """Records that this last line is incomplete."""
    report.cut_line = line.number
    report.cut_bytes = report.cut_bytes or line.num_bytes


def trace_lines(path: str | Path, report: TraceReport, *, progress: bool = False) -> Iterator[TraceLine]:
    """Yields the lines of a trace, with the first header; those of later parts are checked and omitted.
    ``progress``: show progress on a terminal."""
    parts = _parts_of(Path(path))
    if not progress:
        yield from _lines_of_parts(parts, report, no_progress)
        return
    with reading(Path(path), sum(part.stat().st_size for _, part in parts)) as bar:
        yield from _lines_of_parts(parts, report, bar)


def _lines_of_parts(
    parts: list[tuple[int, Path]], report: TraceReport, progress: Progress
) -> Iterator[TraceLine]:
    header: TraceHeader | None = None
    for index, (number, part) in enumerate(parts):
        is_last = index == len(parts) - 1
        report.num_parts += 1
        with closing(PartReader(part)) as reader:
            if reader.foreign is not None:
                raise TraceError(
                    f"{part}: it is compressed with {reader.foreign}; a trace is plain, or compressed with "
                    "zstd: unpack it first"
                )
            upgrade: Upgrade | None = None
            for line in _watched(_lines_of(part, reader, is_last, report), reader, progress):
                if line.number > 1:
                    yield line.upgraded(upgrade)
                    continue
                upgrade = _upgrade_of(line)
                line = line.upgraded(upgrade)
                if header is None:
                    header = _first_header(line, report)
                    yield line
                elif not _check_continues(line, header, number):
                    note_cut(line, report)
                    return
    if header is None:
        what = "is empty" if report.cut_line is None else "is cut off before its first line is whole"
        raise TraceError(f"{parts[0][1]}, line 1: the file {what}, a trace starts with a header")


def _watched(lines: Iterator[TraceLine], reader: PartReader, progress: Progress) -> Iterator[TraceLine]:
    """Yields the lines, and reports progress now and then."""
    reported = 0
    for line in lines:
        yield line
        if not line.number % LINES_PER_LOOK:
            position = reader.position
            progress(position - reported)
            reported = position


def _lines_of(path: Path, reader: PartReader, is_last: bool, report: TraceReport) -> Iterator[TraceLine]:
    number = 0
    try:
        while content := reader.readline(MAX_LINE_BYTES):
            number += 1
            has_end = content.endswith(b"\n")
            if not has_end and len(content) >= MAX_LINE_BYTES:
                raise TraceError(f"{path}, line {number}: longer than any line of a trace")
            if reader.cut and is_last:
                report.cut_bytes = reader.num_lost_bytes()
            yield TraceLine(path, number, content, len(content), may_be_cut=is_last and not has_end)
    except ZstdError as error:
        raise TraceError(f"{path}, line {number + 1}: the compressed file is damaged: {error}") from error
    if reader.cut and report.cut_line is None:
        if not is_last:
            raise TraceError(f"{path}, line {number + 1}: the file is cut off, but a later part is there")
        report.cut_line, report.cut_bytes = number + 1, reader.num_lost_bytes()


# ---- which files ----


def _parts_of(path: Path) -> list[tuple[int, Path]]:
    """Returns the parts with their numbers; TraceError if one in between is missing."""
    if path.is_dir():
        path = _only_trace(path)
    parts = find_parts(split_part(path)[0]) or [(1, path)]
    for (number, _), (following, name) in pairwise(parts):
        if following != number + 1:
            raise TraceError(f"{name}: part {number + 1} of the trace, which comes before it, is missing")
    return parts


def _only_trace(folder: Path) -> Path:
    found = traces_in(folder)
    if len(found) == 1:
        return found[0]
    if not found:
        raise TraceError(f"{folder}: no file of this folder is named like a trace, .jsonl or .jsonl.zst")
    names = ", ".join(path.name for path in found[:3])
    raise TraceError(f"{folder}: the folder has {len(found)} traces ({names} ...): name one of them")


# ---- headers ----


def _first_header(line: TraceLine, report: TraceReport) -> TraceHeader:
    header = _header_of(line)
    report.num_events_before = header.num_events_before
    return header


def _upgrade_of(header: TraceLine) -> Upgrade | None:
    try:
        return upgrade_from(msgspec.json.decode(header.content, type=_AnyHeader).schema_version)
    except UNREADABLE:
        return None  # an error follows when the header is read


def _header_of(line: TraceLine) -> TraceHeader:
    try:
        version = msgspec.json.decode(line.content, type=_AnyHeader).schema_version
        if version == SCHEMA_VERSION:
            return _within_limits(line, msgspec.json.decode(line.content, type=TraceHeader))
    except UNREADABLE as error:
        raise TraceError(f"{line.place}: not the header of a trace: {error}") from error
    raise TraceError(
        f"{line.place}: schema version {version}, but this program reads versions "
        f"{' and '.join(map(str, READABLE_VERSIONS))}; "
        "read the trace with the release that wrote it"
    )


def _within_limits(line: TraceLine, header: TraceHeader) -> TraceHeader:
    wrong = beyond_limits(header)
    if wrong is not None:
        raise TraceError(f"{line.place}: {wrong}")
    return header


def _check_continues(line: TraceLine, first: TraceHeader, number: int) -> bool:
    """Whether a later part's header is complete; TraceError if it belongs to another trace."""
    try:
        header = _header_of(line)
    except TraceError:
        if line.may_be_cut:
            return False
        raise
    begun = (first.wall_time_s, first.monotonic_s)
    if header.part != number or (header.wall_time_s, header.monotonic_s) != begun:
        raise TraceError(f"{line.place}: not part {number} of the trace in the files before it")
    return True

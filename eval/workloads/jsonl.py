"""Reads lines of JSON as typed records; errors name the place in the file. Knows no format."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from eval.errors import UNREADABLE, WorkloadError
from tracing.parts import PartReader, ZstdError

Record = TypeVar("Record")

_PACKED = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\0", "zip": b"PK\x03\x04"}
_MAX_PIECE_BYTES = 1 << 20
_WHERE = re.compile(r"(?P<what>.*) - at `\$(?P<path>.*)`", re.DOTALL)
_STEP = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")


@dataclass(frozen=True, slots=True)
class Place:
    """Place in a file, for error messages about what was read there."""

    path: Path
    line: int | None = None
    """None in a file that is one JSON value."""
    entry: int | None = None
    """Number of the entry in such a file, from 1."""

    @property
    def within(self) -> str:
        """Returns ``on line 3``."""
        return f"in entry {self.entry}" if self.line is None else f"on line {self.line}"

    def error(self, what: str) -> WorkloadError:
        """Returns ``FILE, line 3: what.``"""
        where = str(self.path)
        if self.line is not None:
            where += f", line {self.line}"
        if self.entry is not None:
            where += f", entry {self.entry}"
        return WorkloadError(f"{where}: {what}.")


def read_bytes(path: Path, partial: bool = False) -> bytes:
    """Returns the whole file, unpacked if it is zstd or gzip, without a byte order mark.

    WorkloadError if it cannot be read, or is truncated and ``partial`` does not allow that.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WorkloadError(f"Cannot read the workload {path}: {error.strerror}.") from error
    packed_by = next((name for name, magic in _PACKED.items() if content.startswith(magic)), None)
    if packed_by in ("xz", "zip"):
        raise WorkloadError(f"The workload {path} is packed by {packed_by}: unpack it first.")
    if packed_by is not None:
        content, whole = _unpacked(path, content, packed_by)
        if not whole and not partial:
            raise WorkloadError(f"The workload {path} is cut off: its last {packed_by} frame is not whole.")
    return content.removeprefix(BOM_UTF8)


def _unpacked(path: Path, content: bytes, packed_by: str) -> tuple[bytes, bool]:
    """Returns the content up to a truncation, and whether it is complete."""
    file = gzip.GzipFile(fileobj=io.BytesIO(content)) if packed_by == "gzip" else PartReader(path)
    lines: list[bytes] = []
    try:
        while line := file.readline(_MAX_PIECE_BYTES):
            lines.append(line)
    except EOFError:  # from gzip
        return b"".join(lines), False
    except (ZstdError, gzip.BadGzipFile, zlib.error) as error:
        raise WorkloadError(f"The workload {path} is not a valid {packed_by} file: {error}.") from error
    finally:
        file.close()
    return b"".join(lines), not (isinstance(file, PartReader) and file.cut)


def read_lines(path: Path, record: type[Record], called: str) -> Iterator[tuple[Place, Record]]:
    """Yields the records of a file, one per line or all in one JSON list, with their places. WorkloadError
    names an invalid record.

    ``called`` names the expected kind of record in that error ("a recorded job").
    """
    decoder = msgspec.json.Decoder(record)
    for place, content in _pieces(path):
        try:
            yield place, decoder.decode(content)
        except UNREADABLE as error:
            raise place.error(f"not {called}: {in_words(error)}") from error


def _pieces(path: Path) -> Iterator[tuple[Place, bytes | msgspec.Raw]]:
    content = read_bytes(path)
    if content.lstrip().startswith(b"["):
        try:
            entries = msgspec.json.decode(content, type=list[msgspec.Raw])
        except UNREADABLE as error:
            raise Place(path).error(f"not a JSON list: {in_words(error)}") from error
        for number, entry in enumerate(entries, start=1):
            yield Place(path, entry=number), entry
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line and not line.isspace():
            yield Place(path, number), line


def in_words(error: Exception) -> str:
    """Formats a decoder's error with its path in words: ``$.turns[0].tool_s`` is ``turn 1, field tool_s``."""
    found = _WHERE.fullmatch(str(error))
    if found is None:
        return str(error).rstrip(".")
    words: list[str] = []
    for name, index in _STEP.findall(found["path"]):
        if name:
            words.append(f"field {name}")
        elif words and index.isdecimal():
            words[-1] = f"{_one_of(words[-1])} {int(index) + 1}"
    return f"{', '.join(words)}: {found['what']}" if words else found["what"]


def _one_of(field: str) -> str:
    """Returns the singular of a list's field: ``turn`` for ``field turns``; ``hash_runs`` stays as it is."""
    name = field.removeprefix("field ")
    return name.removesuffix("s") if name in ("turns", "calls", "messages", "conversations") else name

"""The files of one trace: a single one, or parts with numbers in their names; plain or compressed.

It does not know the meaning of their lines.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, ZstdCompressor, ZstdDecompressor, ZstdError, ZstdFile
else:
    from backports.zstd import CompressionParameter, ZstdCompressor, ZstdDecompressor, ZstdError, ZstdFile

__all__ = ["PartReader", "TraceFiles", "ZstdError", "find_parts", "packed", "part_path"]

COMPRESSED = ".zst"
FOREIGN = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip"}
"""First bytes of files compressed by other programs."""
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
FILE_MODE = 0o600
FRAME_BYTES = 4 << 20
"""A compressed frame ends with the batch that reaches this size: until then other tools see it as cut."""
MAX_BLOCK_BYTES = (128 << 10) + 32
"""Maximum size of a compressed block (RFC 8878), with its header and the frame's checksum."""

_PART_NAME = re.compile(r"(?P<stem>.+)\.part(?P<number>[0-9]{4,})(?P<ending>(\.[^.]+)?(\.zst)?)")
_OPTIONS: dict[int, int] = {CompressionParameter.checksum_flag: 1}


def part_path(base: Path, number: int) -> Path:
    """The path of a part: ``trace.jsonl.zst``, then ``trace.part0002.jsonl.zst``, and so on."""
    if number == 1:
        return base
    plain = Path(base.name.removesuffix(COMPRESSED))
    compressed = COMPRESSED if base.name.endswith(COMPRESSED) else ""
    return base.with_name(f"{plain.stem}.part{number:04d}{plain.suffix}{compressed}")


def split_part(path: Path) -> tuple[Path, int]:
    """Returns the path of the first part, and the number of this one."""
    named = _PART_NAME.fullmatch(path.name)
    if named is None:
        return path, 1
    return path.with_name(named["stem"] + named["ending"]), int(named["number"])


def find_parts(base: Path) -> list[tuple[int, Path]]:
    """The existing parts with their numbers; ``base`` is the path of the first one, which may be missing."""
    if not base.parent.is_dir():
        return []
    found = [
        (number, path)
        for path in base.parent.iterdir()
        for first, number in [split_part(path)]
        if first == base
    ]
    return sorted(found)


def traces_in(folder: Path) -> list[Path]:
    """Paths of the first parts of all traces in a folder, by their names."""
    endings = (".jsonl", ".jsonl" + COMPRESSED)
    return sorted({split_part(path)[0] for path in folder.iterdir() if path.name.endswith(endings)})


def packed(text: bytes) -> bytes:
    """Compresses a text into one frame, as ``PartReader`` reads it."""
    return ZstdCompressor(options=_OPTIONS).compress(text, ZstdCompressor.FLUSH_FRAME)


class TraceFiles:
    """Writes a trace, compressed if its name ends in ``.zst``: one file, or parts of which the oldest are
    removed.

    Only their owner can read its files, because they contain agents' commands.
    """

    def __init__(
        self, base: Path, *, max_bytes: int | None = None, max_files: int | None = None, replace: bool = True
    ) -> None:
        """``max_bytes``: a part ends with the batch that reaches this. ``max_files``: maximum number of parts
        kept.

        OSError if the first cannot be written; FileExistsError if it or another part exists and must not be
        replaced. A path that is not a file, such as a pipe, is written to directly.
        """
        self.base = base
        self.number = 1
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._num_frame_bytes = 0
        self._replace = replace or _is_device(base)
        if not self._replace and find_parts(base):
            raise FileExistsError(17, "File exists", str(base))
        self._raw: BinaryIO = _opened(base, replace=self._replace)
        self._file = self._encoder()
        if replace:
            for number, path in find_parts(base):  # of the previous trace
                if number > 1:
                    path.unlink()

    def write(self, data: bytes) -> None:
        self._num_frame_bytes += len(data)
        self._file.write(data)

    def flush(self) -> None:
        """Makes everything written so far readable, even if the process is killed now."""
        if isinstance(self._file, ZstdFile) and self._num_frame_bytes >= FRAME_BYTES:
            self._end_frame(self._file)
        self._file.flush()

    @property
    def full(self) -> bool:
        """Whether the next batch belongs into another part."""
        return self._max_bytes is not None and self._raw.tell() >= self._max_bytes

    def begin_part(self) -> int:
        """Ends the current part and begins the next; returns its number."""
        self.close()
        self.number += 1
        self._raw = _opened(part_path(self.base, self.number), replace=self._replace)
        self._file = self._encoder()
        if self._max_files is not None and self.number > self._max_files:
            with contextlib.suppress(OSError):
                part_path(self.base, self.number - self._max_files).unlink()
        return self.number

    def close(self) -> None:
        self._file.close()
        self._raw.close()

    def _encoder(self) -> BinaryIO | ZstdFile:
        self._num_frame_bytes = 0
        if not self.base.name.endswith(COMPRESSED):
            return self._raw
        return ZstdFile(self._raw, "wb", options=_OPTIONS)

    def _end_frame(self, file: ZstdFile) -> None:
        file.flush(ZstdCompressor.FLUSH_FRAME)
        self._num_frame_bytes = 0


def _is_device(path: Path) -> bool:
    """Whether the path is neither file nor folder (a pipe, a device): writing there replaces nothing."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _opened(path: Path, *, replace: bool) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if replace else os.O_EXCL)
    descriptor = os.open(path, flags, FILE_MODE)
    if path.is_file():
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, FILE_MODE)  # for a file that is replaced
    return os.fdopen(descriptor, "wb")


def _readable(path: Path) -> io.BufferedReader:
    return open(path, "rb")


class PartReader:
    """Reads the text of a part line by line; it may end in the middle of a compressed frame."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file cannot be opened."""
        self._raw = _readable(path)
        self.foreign = next(
            (name for magic, name in FOREIGN.items() if self._raw.peek(8).startswith(magic)), None
        )
        """The program that compressed it, if that was not zstd."""
        self._decoded: _Decoded | None = None
        self._lines: io.BufferedReader = self._raw
        if self._raw.peek(4)[:4] == ZSTD_MAGIC:
            self._decoded = _Decoded(ZstdFile(self._raw))
            self._lines = io.BufferedReader(self._decoded, 1 << 16)

    def readline(self, max_bytes: int) -> bytes:
        """The next line, with its line end if any; empty at the end. ZstdError if it is not valid zstd."""
        return self._lines.readline(max_bytes)

    @property
    def position(self) -> int:
        """Number of bytes of the file that have been read; 0 if it is not a file."""
        return self._raw.tell() if self._raw.seekable() else 0

    @property
    def cut(self) -> bool:
        """Whether the last frame read was incomplete."""
        return self._decoded is not None and self._decoded.cut

    def num_lost_bytes(self) -> int:
        """Number of bytes at the end of a cut part that belong to no whole block."""
        self._raw.seek(0)
        return _num_undecodable_bytes(self._raw)

    def close(self) -> None:
        self._raw.close()


class _Decoded(io.RawIOBase):
    """Decompressed contents of a file, up to the point where it is cut."""

    def __init__(self, file: ZstdFile) -> None:
        self._file = file
        self.cut = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            data = self._file.read1(len(buffer))
        except EOFError:
            self.cut = True
            return 0
        buffer[: len(data)] = data
        return len(data)


def _num_undecodable_bytes(file: BinaryIO) -> int:
    """Number of undecodable bytes at the file's end.

    The last bytes are decoded one by one, as no block is longer than ``MAX_BLOCK_BYTES``.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    frame = ZstdDecompressor()
    last_told = 0
    for offset, chunk in _chunks(file, size):
        while chunk:
            if frame.eof:
                frame = ZstdDecompressor()
            if frame.decompress(chunk) or frame.eof:
                last_told = offset + len(chunk) - len(frame.unused_data)
            chunk = frame.unused_data if frame.eof else b""
    return size - last_told


def _chunks(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """Yields large chunks, then single bytes at the end of the file, each with its offset."""
    offset = 0
    while offset < size:
        chunk = file.read(max(1, min(1 << 16, size - MAX_BLOCK_BYTES - offset)))
        yield offset, chunk
        offset += len(chunk)

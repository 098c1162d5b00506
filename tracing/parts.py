"""The files of one trace: a single one, or parts with numbers in their names; plain or compressed.

Knows nothing of what their lines say.
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
"""A compressed block is never longer (RFC 8878), its header and the frame's checksum included."""

_PART_NAME = re.compile(r"(?P<stem>.+)\.part(?P<number>[0-9]{4,})(?P<ending>(\.[^.]+)?(\.zst)?)")
_OPTIONS: dict[int, int] = {CompressionParameter.checksum_flag: 1}


def part_path(base: Path, number: int) -> Path:
    """``trace.jsonl.zst``, then ``trace.part0002.jsonl.zst``, and so on."""
    if number == 1:
        return base
    plain = Path(base.name.removesuffix(COMPRESSED))
    compressed = COMPRESSED if base.name.endswith(COMPRESSED) else ""
    return base.with_name(f"{plain.stem}.part{number:04d}{plain.suffix}{compressed}")


def split_part(path: Path) -> tuple[Path, int]:
    """The name of the first part, and which one this is."""
    named = _PART_NAME.fullmatch(path.name)
    if named is None:
        return path, 1
    return path.with_name(named["stem"] + named["ending"]), int(named["number"])


def find_parts(base: Path) -> list[tuple[int, Path]]:
    """The parts that are there, by number; ``base`` is the first one's name, and may be gone."""
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
    """Names of the first parts of all that is named like a trace in a folder."""
    endings = (".jsonl", ".jsonl" + COMPRESSED)
    return sorted({split_part(path)[0] for path in folder.iterdir() if path.name.endswith(endings)})


def packed(text: bytes) -> bytes:
    """In one frame, as ``PartReader`` reads it."""
    return ZstdCompressor(options=_OPTIONS).compress(text, ZstdCompressor.FLUSH_FRAME)


class TraceFiles:
    """Writes a trace: into one file, or into parts of which the oldest go. Compressed if its name says so.

    Its files are readable by their owner only: they contain agents' commands.
    """

    def __init__(
        self, base: Path, *, max_bytes: int | None = None, max_files: int | None = None, replace: bool = True
    ) -> None:
        """``max_bytes``: a part ends with the batch that reaches it. ``max_files``: how many parts are kept.

        OSError if the first cannot be written; FileExistsError if it, or a part of it, is there and is not to
        be replaced. What is no file, such as a pipe, is written to as it is.
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
            for number, path in find_parts(base):  # of the trace that was there before
                if number > 1:
                    path.unlink()

    def write(self, data: bytes) -> None:
        self._num_frame_bytes += len(data)
        self._file.write(data)

    def flush(self) -> None:
        """Make all that was written readable, even if the process is killed now."""
        if isinstance(self._file, ZstdFile) and self._num_frame_bytes >= FRAME_BYTES:
            self._end_frame(self._file)
        self._file.flush()

    @property
    def full(self) -> bool:
        """Whether what comes next belongs into another part."""
        return self._max_bytes is not None and self._raw.tell() >= self._max_bytes

    def begin_part(self) -> int:
        """End the present part and begin the next; its number."""
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
            os.fchmod(descriptor, FILE_MODE)  # of one that is replaced
    return os.fdopen(descriptor, "wb")


def _readable(path: Path) -> io.BufferedReader:
    return open(path, "rb")


class PartReader:
    """The text of a part, line by line; it may end in the middle of a compressed frame."""

    def __init__(self, path: Path) -> None:
        """OSError if it cannot be opened."""
        self._raw = _readable(path)
        self.foreign = next(
            (name for magic, name in FOREIGN.items() if self._raw.peek(8).startswith(magic)), None
        )
        """What compressed it, if that was not zstd."""
        self._decoded: _Decoded | None = None
        self._lines: io.BufferedReader = self._raw
        if self._raw.peek(4)[:4] == ZSTD_MAGIC:
            self._decoded = _Decoded(ZstdFile(self._raw))
            self._lines = io.BufferedReader(self._decoded, 1 << 16)

    def readline(self, max_bytes: int) -> bytes:
        """The next line, without its end if it has none; empty at the end. ZstdError if it is no zstd."""
        return self._lines.readline(max_bytes)

    @property
    def position(self) -> int:
        """Bytes of the file that have been read; 0 if it is not a file."""
        return self._raw.tell() if self._raw.seekable() else 0

    @property
    def cut(self) -> bool:
        """Whether the last frame read was not whole."""
        return self._decoded is not None and self._decoded.cut

    def num_lost_bytes(self) -> int:
        """Bytes at the end of a cut part that belong to no whole block."""
        self._raw.seek(0)
        return _num_undecodable_bytes(self._raw)

    def close(self) -> None:
        self._raw.close()


class _Decoded(io.RawIOBase):
    """Decompressed contents of a file, up to where it is cut."""

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

    Its last bytes are decoded one by one, as no block is longer than ``MAX_BLOCK_BYTES``.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    frame, last_told = ZstdDecompressor(), 0
    for offset, chunk in _chunks(file, size):
        while chunk:
            if frame.eof:
                frame = ZstdDecompressor()
            if frame.decompress(chunk) or frame.eof:
                last_told = offset + len(chunk) - len(frame.unused_data)
            chunk = frame.unused_data if frame.eof else b""
    return size - last_told


def _chunks(file: BinaryIO, size: int) -> Iterator[tuple[int, bytes]]:
    """Large ones, then the last of the file by the byte, each with where it begins."""
    offset = 0
    while offset < size:
        chunk = file.read(max(1, min(1 << 16, size - MAX_BLOCK_BYTES - offset)))
        yield offset, chunk
        offset += len(chunk)

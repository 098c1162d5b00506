"""Files in which servers keep KV blocks for each other and for their next start, named by the blocks' hashes.

``SHARED/DIGEST/rank0-of-1/3f/3f9a…``: the digest identifies the model and the layout of its KV, so that what
does not fit is not found. A file is complete as soon as it has its name. Its head describes the content: a
block that was cut or changed is not read.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

MAGIC = b"KVB1"
_HEAD = struct.Struct("<4sIQ")
"""The magic, the CRC-32 of the block, its length in bytes."""
ABOUT = "about.txt"
TMP_SUFFIX = ".tmp"
MAX_AGE_S = 86_400.0
"""Time without use after which what a drained core has left is deleted: a day."""
TMP_LIFE_S = 3600.0
"""Age at which an incomplete file counts as left by a process that has died."""


class DamagedBlockError(OSError):
    """A file is not the block that its name says."""


def folder_of(shared: str | Path, fingerprint: str, rank: int, size: int) -> Path:
    """The folder in which a rank of this model keeps its part of the blocks."""
    return _model_folder(shared, fingerprint) / f"rank{rank}-of-{size}"


def _model_folder(shared: str | Path, fingerprint: str) -> Path:
    return Path(shared).expanduser() / hashlib.sha256(fingerprint.encode()).hexdigest()[:16]


def make_folder(shared: str | Path, fingerprint: str, rank: int, size: int) -> Path:
    """Make this folder, and a note next to it that explains the digest; OSError if it cannot be written
    to."""
    folder = folder_of(shared, fingerprint, rank, size)
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f"{os.getpid()}{TMP_SUFFIX}"
    probe.write_text(fingerprint + "\n", encoding="utf-8")
    os.replace(probe, _model_folder(shared, fingerprint) / ABOUT)
    return folder


class SavedBlocks:
    """The ``BlockStore`` of one rank in such a folder. Several processes may use one folder."""

    def __init__(self, folder: Path, block_bytes: int = 0) -> None:
        """``block_bytes``: the length of each block, needed to read and write them."""
        self.place = folder
        self._block_bytes = block_bytes
        self._numbers = itertools.count()

    def num_held(self, names: Sequence[bytes]) -> int:
        """The blocks up to the last one that is here. One before it may be gone: then the load fails.

        Blocks are saved and used from the first on, so thousands of blocks take a dozen look-ups.
        """
        low = 0
        high = len(names)
        while low < high:
            middle = (low + high) // 2
            if os.path.exists(self._path(names[middle])):
                low = middle + 1
            else:
                high = middle
        return low

    def read(self, names: Sequence[bytes], buffer: memoryview) -> None:
        """Fill a buffer with blocks of ``block_bytes``, and note their use.

        FileNotFoundError if one is gone. DamagedBlockError if its content is another one: then it is deleted.
        """
        size = self._block_bytes
        for index, name in enumerate(names):
            self._read(name, buffer[index * size : (index + 1) * size])

    def _read(self, name: bytes, buffer: memoryview) -> None:
        path = self._path(name)
        try:
            _read(path, buffer)
        except DamagedBlockError:
            self.delete([name])
            raise
        with suppress(OSError):
            os.utime(path)

    def write(self, names: Sequence[bytes], content: memoryview) -> int:
        """Keep blocks, unless they are here already. Returns the bytes written; OSError if one cannot be."""
        size = self._block_bytes
        return sum(
            self._write(name, content[index * size : (index + 1) * size]) for index, name in enumerate(names)
        )

    def _write(self, name: bytes, content: memoryview) -> int:
        path = self._path(name)
        if os.path.exists(path):
            os.utime(path)
            return 0
        begun = f"{path}.{os.getpid()}-{next(self._numbers)}{TMP_SUFFIX}"
        head = _HEAD.pack(MAGIC, zlib.crc32(content), len(content))
        try:
            _write(begun, head, content)
            os.replace(begun, path)
        except OSError:
            with suppress(OSError):
                os.unlink(begun)
            raise
        return len(head) + len(content)

    def delete(self, names: Sequence[bytes]) -> None:
        """Delete those of these blocks that are here."""
        for name in names:
            with suppress(OSError):
                os.unlink(self._path(name))

    def at(self, place: Path) -> SavedBlocks:
        """The blocks of another model."""
        return SavedBlocks(place, self._block_bytes)

    def close(self) -> None:
        pass

    def shrink(self, max_bytes: int) -> None:
        """Delete the least recently used blocks beyond a limit, down to nine tenths of it."""
        files = sorted(self._files())
        num_bytes = sum(size for _, size, _ in files)
        if num_bytes <= max_bytes:
            return
        for _, size, path in files:
            if num_bytes <= max_bytes * 9 // 10:
                break
            with suppress(OSError):
                os.unlink(path)
            num_bytes -= size

    def delete_unused(self) -> None:
        """Delete the blocks that nobody has used for a day."""
        oldest = time.time() - MAX_AGE_S
        for used_at, _, path in self._files():
            if used_at < oldest:
                with suppress(OSError):
                    os.unlink(path)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """The last use, the size and the path of each block. Deletes old incomplete files."""
        now = time.time()
        for shard in _listed(self.place):
            for entry in _listed(shard.path) if shard.is_dir() else ():
                with suppress(OSError):
                    seen = entry.stat()
                    if not entry.name.endswith(TMP_SUFFIX):
                        yield seen.st_mtime, seen.st_size, entry.path
                    elif now - seen.st_mtime > TMP_LIFE_S:
                        os.unlink(entry.path)

    def _path(self, name: bytes) -> str:
        text = name.hex()
        return os.path.join(self.place, text[:2], text)


def _listed(folder: str | Path) -> list[os.DirEntry[str]]:
    """The entries of a folder; none if it is gone."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _read(path: str, buffer: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        head = file.read(_HEAD.size)
        num_read = 0
        while num_read < len(buffer) and (count := file.readinto(buffer[num_read:])):
            num_read += count
    if head != _HEAD.pack(MAGIC, zlib.crc32(buffer[:num_read]), len(buffer)) or num_read < len(buffer):
        raise DamagedBlockError(f"{path} is damaged")


def _write(path: str, head: bytes, content: memoryview) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb", buffering=0) as file:
        for part in (memoryview(head), content):
            while part:
                part = part[file.write(part) :]

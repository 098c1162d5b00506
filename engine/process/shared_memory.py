"""Memory that several processes of a server share."""

from __future__ import annotations

import mmap
from pathlib import Path


def mapped(path: Path, size: int) -> mmap.mmap:
    """Maps a file of ``size`` bytes, zeros if it is new. The mapping outlives the file's handle."""
    with path.open("a+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)

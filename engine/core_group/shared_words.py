"""Memory that the routers of a server's API server processes share."""

from __future__ import annotations

import mmap
from pathlib import Path

from engine.process.shared_memory import mapped
from engine.routing import SHARED_WORDS

_WORD_BYTES = 8


def shared_words(folder: Path | None = None) -> memoryview:
    """``SHARED_WORDS`` words of 64 bits, 0 at first: those of a file in ``folder``, or this process's own.
    Pages that are never written take no memory."""
    size = SHARED_WORDS * _WORD_BYTES
    if folder is None:
        return memoryview(mmap.mmap(-1, size)).cast("Q")
    return memoryview(mapped(folder / "homes", size)).cast("Q")

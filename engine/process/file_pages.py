"""Drops mapped pages of files, mostly of libraries' code, from the process's resident memory."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

_MAPPINGS = Path("/proc/self/smaps")
_ONLY_READ = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ \d+ +/.*\n(?:[A-Z]\w*:.*\n)*?Anonymous: +0 kB$", re.MULTILINE
)
"""Start and end of a read-only private mapping of a file of which no page was changed."""
_MADV_DONTNEED = 4


def drop_file_pages() -> None:
    """Drop all file pages from this process, which would otherwise keep those that only its startup needed.

    They stay in the page cache as long as the system has no better use for them, and come back when they are
    touched. Does nothing without /proc or madvise(2).
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with suppress(OSError):
        for mapping in _ONLY_READ.finditer(_MAPPINGS.read_text(errors="replace")):
            start, end = (int(address, 16) for address in mapping.groups())
            madvise(start, end - start, _MADV_DONTNEED)

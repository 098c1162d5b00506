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
"""Matches a read-only private mapping of a file without changed pages; groups: its start and end."""
_MADV_DONTNEED = 4


def drop_file_pages() -> None:
    """Drops unchanged file pages from this process, since most of them were needed only at startup.

    They stay in the system's page cache while there is memory for them, and are mapped again when touched.
    Does nothing without /proc or madvise(2).
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with suppress(OSError):
        for mapping in _ONLY_READ.finditer(_MAPPINGS.read_text(errors="replace")):
            start, end = (int(address, 16) for address in mapping.groups())
            madvise(start, end - start, _MADV_DONTNEED)

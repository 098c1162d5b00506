"""Pages of files, libraries' code above all, that a process has touched. Knows nothing of what it serves."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from pathlib import Path

_MAPPINGS = Path("/proc/self/smaps")
_ONLY_READ = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ \d+ +/.*\n(?:[A-Z]\w*:.*\n)*?Anonymous: +0 kB$", re.MULTILINE
)
"""Start and end of a private mapping of a file, which nobody writes to and of which no page was changed."""
_MADV_DONTNEED = 4


def drop_file_pages() -> None:
    """Take them out of this process, which keeps those that its start alone has needed as long as it lives.

    The system has them still, as long as it has no better use for them, and gives each back when it is
    touched. Does nothing where there is no /proc or no madvise(2).
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with suppress(OSError):
        for mapping in _ONLY_READ.finditer(_MAPPINGS.read_text(errors="replace")):
            start, end = (int(address, 16) for address in mapping.groups())
            madvise(start, end - start, _MADV_DONTNEED)

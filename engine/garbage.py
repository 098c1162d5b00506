"""What a process that serves for long does once all is loaded. Knows nothing of what it serves."""

from __future__ import annotations

import ctypes
import gc

from engine.file_pages import let_go_of_file_pages

YOUNG_OBJECTS = 10_000
"""New ones at which the collector looks for garbage: a request makes hundreds, and few of them in circles."""


def settle() -> None:
    """The objects that are there now stay, and are not looked at again; the files' pages need not, nor what
    was freed on the way here."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    let_go_of_file_pages()
    give_back_freed()


def give_back_freed() -> None:
    """Return to the system what was freed: an allocator keeps it for later, and weights come but once.

    Does nothing where the C library is not glibc (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

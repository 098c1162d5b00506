"""What a process that serves for long does once all is loaded. Knows nothing of what it serves."""

from __future__ import annotations

import gc

from engine.file_pages import let_go_of_file_pages

YOUNG_OBJECTS = 10_000
"""New ones at which the collector looks for garbage: a request makes hundreds, and few of them in circles."""


def settle() -> None:
    """The objects that are there now stay, and are not looked at again; the files' pages need not."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    let_go_of_file_pages()

"""The garbage collector of a process that serves for long. Knows nothing of what it serves."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""New ones at which it looks for garbage: a request in work makes hundreds, and few of them in circles."""


def settle() -> None:
    """What is there now stays: it is not looked at again. To be called once all is loaded."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)

"""Shows the progress of reading a file, on a terminal and only if it takes more than a moment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from tqdm import tqdm

from tracing.plain_text import plain_name

DELAY_S = 1.0
"""Shorter reads show no progress."""
LINES_PER_LOOK = 1000


class Progress(Protocol):
    def __call__(self, num_bytes: int) -> object:
        """Adds the number of bytes just read."""


def no_progress(num_bytes: int) -> None:
    """Does nothing, for callers that show no progress."""


@contextmanager
def reading(path: Path, total_bytes: int, delay_s: float = DELAY_S) -> Iterator[Progress]:
    """Shows a bar on stderr, if that is a terminal."""
    with tqdm(
        desc=f"reading {plain_name(path.name)}",
        total=total_bytes,
        unit="B",
        unit_scale=True,
        delay=delay_s,
        leave=False,
        disable=None,
        file=sys.stderr,
    ) as bar:
        yield bar.update

"""How long the phases of a start take, for whoever waits for it."""

from __future__ import annotations

import time

Phases = tuple[tuple[str, float], ...]
"""Names of phases in their order, and the seconds that each took."""


class StartPhases:
    """Measures phases that follow each other."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._done: list[tuple[str, float]] = []

    def end(self, name: str) -> None:
        """Note that a phase has ended, and the next one begins."""
        now = time.monotonic()
        self._done.append((name, now - self._last))
        self._last = now

    def all(self) -> Phases:
        """Those that have ended."""
        return tuple(self._done)

"""The front-end processes of one server: which of them this is, and where they keep what they share.

A server with one process has no folder: what it holds, it holds in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ALL_END = "all-end"


@dataclass(frozen=True, slots=True)
class Siblings:
    """One process's place among ``count``; a process that is restarted keeps its place."""

    index: int = 0
    count: int = 1
    folder: Path | None = None
    """Private to this server, shared by its front ends, gone with it; None where there is only one."""

    def say_all_end(self) -> None:
        """The whole server is about to stop, not one process of it."""
        if self.folder is not None:
            (self.folder / _ALL_END).touch()

    @property
    def others_go_on(self) -> bool:
        """Whether there are others who take requests when this one stops."""
        return self.folder is not None and self.count > 1 and not (self.folder / _ALL_END).exists()


ALONE = Siblings()

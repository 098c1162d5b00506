"""The group of API server processes of one server: this one's index, and the folder they share.

A server with one process has no folder: its state is in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ALL_END = "all-end"


@dataclass(frozen=True, slots=True)
class ServerGroup:
    """One process's index among ``count``; a restarted process keeps its index."""

    index: int = 0
    count: int = 1
    folder: Path | None = None
    """The folder that the processes share, private to this server and removed with it; None for one
    process."""

    def say_all_end(self) -> None:
        """Reports that the whole server is stopping, not only this process."""
        if self.folder is not None:
            (self.folder / _ALL_END).touch()

    @property
    def others_go_on(self) -> bool:
        """Whether other processes accept requests when this one stops."""
        return self.folder is not None and self.count > 1 and not (self.folder / _ALL_END).exists()


ALONE = ServerGroup()

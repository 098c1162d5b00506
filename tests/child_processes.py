"""Finds processes by their command lines, read from Linux's /proc."""

from __future__ import annotations

from pathlib import Path


def children_of(parent: int, saying: str) -> list[int]:
    """Returns process ids of the live children whose command line contains these words.

    A child, or a thread of the parent, may end between being listed and being read.
    """
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        found += [int(pid) for pid in _read(task / "children").split()]
    return [pid for pid in found if saying in _read(Path(f"/proc/{pid}/cmdline"))]


def processes_with(saying: str, variable: str) -> set[int]:
    """Returns process ids of all processes whose command line contains these words and whose environment has
    this ``NAME=value``, whoever started them."""
    found = [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
    found = [path for path in found if saying in _read(path / "cmdline")]
    return {int(path.name) for path in found if variable in _read(path / "environ").split("\0")}


def _read(file: Path) -> str:
    """Reads a file of /proc; empty if its process has ended."""
    try:
        return file.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""

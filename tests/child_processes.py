"""Finds the child processes of a process by what their command lines say, as Linux tells it."""

from __future__ import annotations

from pathlib import Path


def children_of(parent: int, saying: str) -> list[int]:
    """Process ids of the children whose command line has these words, those that run.

    A child may end, and a thread of the parent too, between being listed and being read.
    """
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        found += [int(pid) for pid in _read(task / "children").split()]
    return [pid for pid in found if saying in _read(Path(f"/proc/{pid}/cmdline"))]


def processes_with(saying: str, variable: str) -> set[int]:
    """Process ids of all whose command line has these words and whose environment this ``NAME=value``,
    whoever started them."""
    found = [path for path in Path("/proc").iterdir() if path.name.isdecimal()]
    found = [path for path in found if saying in _read(path / "cmdline")]
    return {int(path.name) for path in found if variable in _read(path / "environ").split("\0")}


def _read(file: Path) -> str:
    """What a process tells of itself, empty if it has ended."""
    try:
        return file.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""

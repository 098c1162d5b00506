"""Measures the memory of a server's processes, as the kernel counts it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_FIELD = re.compile(r"^(PPid|VmRSS|VmHWM):\s+(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Resident:
    """Bytes of a process and all its descendants. Memory that several of them share counts for each."""

    now: int
    peak: int


def resident(pid: int) -> Resident | None:
    """Returns None if the kernel does not report it."""
    fields = dict(_processes())
    if pid not in fields:
        return None
    family = {pid}
    # A child's pid is mostly higher than its parent's, but pids wrap around at some time.
    while grown := {each for each, of in fields.items() if of["PPid"] in family} - family:
        family |= grown
    of_family = [fields[each] for each in family]
    return Resident(
        now=1024 * sum(each.get("VmRSS", 0) for each in of_family),
        peak=1024 * sum(each.get("VmHWM", 0) for each in of_family),
    )


def _processes() -> Iterator[tuple[int, dict[str, int]]]:
    for folder in PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process has ended meanwhile
            status = (folder / "status").read_text(errors="replace")
            yield int(folder.name), {name: int(value) for name, value in _FIELD.findall(status)}

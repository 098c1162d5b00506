"""How much memory a device has left, what gives some back, and sizes in words."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(device: torch.device) -> int:
    """Memory that a new allocation on ``device`` can have."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min(_host_bytes(), _container_bytes())


def give_back_freed() -> None:
    """Return to the system what was freed: an allocator keeps it for later, and weights come but once.

    Does nothing where the C library is not glibc (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def as_gib(num_bytes: int) -> str:
    """``num_bytes`` in GiB for a message, with the exact count beside it."""
    return f"{num_bytes / 2**30:.2f} GiB ({num_bytes} bytes)"


def _host_bytes() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes() -> int:
    """What a container's own limit leaves; file pages that can be dropped do not count as used."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = (_CGROUP / "memory.stat").read_text(encoding="ascii")
    except OSError:
        return 2**63
    if limit == "max":
        return 2**63
    droppable = next((int(x.split()[1]) for x in stat.splitlines() if x.startswith("inactive_file ")), 0)
    return int(limit) - used + droppable

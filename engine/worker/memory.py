"""How much memory a device has left, what gives some back, and sizes in words."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MADV_POPULATE_WRITE = 23
_POPULATED_AT_ONCE = 32 * 2**20
_BEHIND_ALL_OTHERS = 19


def available_bytes(device: torch.device) -> int:
    """Memory that a new allocation on ``device`` can have."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min(_host_bytes(), _container_bytes())


def keep_freed() -> None:
    """From here on keep what is freed, up to 64 MiB at a time: the next step wants as much, and pages that
    come anew from the system take a quarter of the time of a short prompt.

    Does nothing where the C library has no mallopt(3)."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 64 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 128 * 2**20)


def zeros_on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the system hands out in the background: to wait for gigabytes of them takes seconds.

    What is touched before its turn is given at once, as always.
    """
    zeros = untouched_zeros(shape, dtype)
    if zeros.nbytes > _POPULATED_AT_ONCE:
        threading.Thread(target=_populate, args=(zeros,), name="populate", daemon=True).start()
    return zeros


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages, large ones if there are, the system hands out when they are first touched. They are
    shared with no other tensor."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError, AttributeError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def _populate(zeros: torch.Tensor) -> None:
    """Touch all pages without changing them, while nothing else wants the core (Linux 5.14 and later)."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)  # mmap's own holds the interpreter's lock
    if madvise is None or not hasattr(os, "setpriority"):
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BEHIND_ALL_OTHERS)
    for start in range(0, zeros.nbytes, _POPULATED_AT_ONCE):
        num_bytes = min(_POPULATED_AT_ONCE, zeros.nbytes - start)
        if madvise(zeros.data_ptr() + start, num_bytes, _MADV_POPULATE_WRITE):
            return


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

"""Measures free memory, allocates host memory on large pages, and formats sizes."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_HUGE_PAGE = 2**21
_LEAST_POPULATED = 32 * 2**20
"""Less memory than this is left to page faults."""
_PAUSE = 3.0
"""Background work pauses this many times as long as its last piece took: it uses a quarter of a core.

It has the usual priority, and pieces of one huge page. Each piece holds the process's memory-map lock, and
while other processes keep a holder of low priority off its core, every thread that maps memory waits for it.
"""
BACKGROUND_DELAY_S = 2.0
"""Delay before background work starts, so that a starting server does not wait for that lock."""


class _Host:
    num_engines = 1
    """Engine cores that start on this host at the same time."""


def share_host_memory(num_engines: int) -> None:
    """Make ``available_bytes`` of the host return this engine core's part, as other cores start there too."""
    _Host.num_engines = num_engines


def available_bytes(device: torch.device) -> int:
    """Memory that a new allocation on ``device`` can have."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return min(_host_bytes(), _container_bytes()) // _Host.num_engines


def keep_freed_memory() -> None:
    """Make malloc keep freed memory, up to 64 MiB per allocation, instead of returning it to the system: the
    next step needs as much again, and faulting in fresh pages takes a quarter of the time of a short prompt.

    Does nothing where the C library has no mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 64 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 128 * 2**20)


def zeros_on_host(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose pages are populated in the background, because waiting for gigabytes of page faults
    takes seconds.

    A page that is touched earlier is faulted in at once, as usual.
    """
    memory = _map_huge_pages(shape, dtype)
    if len(memory) > _LEAST_POPULATED:
        reference = weakref.ref(memory)
        _run_in_background("populate", lambda: _populate(reference))
    return _as_tensor(memory, shape, dtype)


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return zeros whose pages, huge ones if available, are allocated when first touched. No other tensor
    shares the memory."""
    return _as_tensor(_map_huge_pages(shape, dtype), shape, dtype)


def empty_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor on pages that it does not share, aligned to a huge page."""
    num_numbers = math.prod(shape)
    memory = _map(num_numbers * dtype.itemsize + _HUGE_PAGE)
    start = _address(memory)
    return torch.frombuffer(memory, dtype=dtype, count=num_numbers, offset=-start % _HUGE_PAGE).view(*shape)


_released: set[int] = set()
"""Start addresses of memory that was released: it is not populated in the background."""


def release_pages(tensor: torch.Tensor) -> None:
    """Return a tensor's memory to the system, which then reads as zeros. The tensor must not share pages."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    _released.add(tensor.data_ptr())
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = tensor.data_ptr() + tensor.nbytes - start
    if num_bytes >= mmap.PAGESIZE:
        madvise(start, num_bytes // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_DONTNEED)


def use_huge_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Collapse the memory of tensors from ``empty_pages`` into huge pages, in the background: doing it on
    first touch takes seconds (Linux 6.1 and later)."""
    starts = [start for tensor in tensors for start in _whole_huge_pages(tensor)]
    _run_in_background("large-pages", lambda: _collapse(starts))


def _run_in_background(name: str, work: Callable[[], None]) -> None:
    """Run ``work`` on a thread after ``BACKGROUND_DELAY_S``. It must hold no tensor: freeing one releases the
    GIL and takes it again, and a thread that waits for the GIL while the interpreter exits aborts the
    process."""
    thread = threading.Timer(BACKGROUND_DELAY_S, work)
    thread.name = name
    thread.daemon = True
    thread.start()


def _whole_huge_pages(tensor: torch.Tensor) -> range:
    """Addresses of the huge pages that are wholly inside the tensor; none if it is not aligned to one."""
    start = tensor.data_ptr()
    end = start + tensor.nbytes - _HUGE_PAGE + 1 if start % _HUGE_PAGE == 0 else start
    return range(start, end, _HUGE_PAGE)


def _collapse(starts: Sequence[int]) -> None:
    """Collapse each range into a huge page. One that the system cannot move now, because something else uses
    it, stays as it is."""
    madvise = _madvise()
    if madvise is None:
        return
    for start in starts:
        with _pause_after():
            madvise(start, _HUGE_PAGE, _MADV_COLLAPSE)


def _map(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _map_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> mmap.mmap:
    memory = _map(math.prod(shape) * dtype.itemsize)
    with suppress(OSError, AttributeError):  # not supported by this system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _as_tensor(memory: mmap.mmap, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _populate(reference: weakref.ref[mmap.mmap]) -> None:
    """Populate all pages without changing them (Linux 5.14 and later), while the memory is still referenced
    and not released."""
    madvise = _madvise()
    start = 0
    while madvise is not None and (memory := reference()) is not None and start < len(memory):
        if any(0 <= released - _address(memory) < len(memory) for released in _released):
            return
        num_bytes = min(_HUGE_PAGE, len(memory) - start)
        with _pause_after():
            failed = madvise(_address(memory) + start, num_bytes, _MADV_POPULATE_WRITE)
            del memory  # not referenced during the pause
        if failed:
            return
        start += num_bytes


@contextmanager
def _pause_after() -> Iterator[None]:
    """Sleep after a piece of background work, in proportion to the time that it took."""
    began_s = time.monotonic()
    yield
    time.sleep(_PAUSE * (time.monotonic() - began_s))


def _madvise() -> Callable[[int, int, int], int] | None:
    """Return madvise(2), or None where the system has none. Python's own ``mmap.madvise`` holds the GIL."""
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    typed: Callable[[int, int, int], int] = madvise
    return typed


def as_gib(num_bytes: int) -> str:
    """Format ``num_bytes`` in GiB for a message, followed by the exact count."""
    return f"{num_bytes / 2**30:.2f} GiB ({num_bytes} bytes)"


def _host_bytes() -> int:
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_bytes() -> int:
    """Memory left under the container's limit; page cache that can be dropped does not count as used."""
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

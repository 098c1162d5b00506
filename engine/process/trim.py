"""Trims the memory of a long-running process: after startup, and again when it is idle."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable

from engine.process.file_pages import drop_file_pages

YOUNG_OBJECTS = 10_000
"""Threshold of the garbage collector's youngest generation: a request allocates hundreds of objects, few of
them in reference cycles."""
POLL_S = 1.0
"""How often to check whether the process is idle."""
IDLE_CPU_S = 0.02
"""A process that uses at most this CPU time between two checks is idle; an idle server uses a fifth of it."""
FIRST_WORK_S = 0.05
"""CPU time before the first trim at idle, about a few requests: they touch most pages that any work
touches."""
WORK_FACTOR = 10
"""Factor by which the work before each next trim grows: later work rarely touches new code."""


def finish_startup() -> None:
    """Freezes the objects that exist now, so that the garbage collector skips them, and returns memory that
    only the startup needed. A thread trims again when the process is idle after its first work, after ten
    times as much work, and so on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    gc.enable()
    _trim()
    threading.Thread(target=_trim_when_idle, name="trim-when-idle", daemon=True).start()


def give_back_freed() -> None:
    """Returns freed memory to the system: the allocator would keep it, but weights are loaded only once. Does
    nothing if the C library is not glibc (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def await_idle_after(
    work_s: float, cpu_s: Callable[[], float] = time.process_time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Returns when the process has used ``work_s`` of CPU time and is idle afterwards. ``cpu_s`` returns the
    CPU time used so far, on all cores."""
    now = cpu_s()
    worked_at = now + work_s
    idle = False
    while now < worked_at or not idle:
        before = now
        sleep(POLL_S)
        now = cpu_s()
        idle = now - before <= IDLE_CPU_S


def _trim() -> None:
    drop_file_pages()
    give_back_freed()


def _trim_when_idle() -> None:
    work_s = FIRST_WORK_S
    while True:
        await_idle_after(work_s)
        _trim()
        work_s *= WORK_FACTOR

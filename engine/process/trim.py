"""What a process that serves for long does once all is loaded. Knows nothing of what it serves."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable

from engine.process.file_pages import drop_file_pages

YOUNG_OBJECTS = 10_000
"""New ones at which the collector looks for garbage: a request makes hundreds, and few of them in circles."""
LOOK_EVERY_S = 1.0
"""Between looks at whether the process rests."""
REST_S = 0.02
"""Of all cores' time from one look to the next: an idle server's clocks take a fifth of it."""
FIRST_WORK_S = 0.05
"""Of all cores' time, a few requests': they touch most of what any work touches, and what the first does."""
MORE_WORK = 10
"""How many times as much work comes before the next time: new kinds of work are ever fewer."""


def settle() -> None:
    """The objects that are there now stay, and are not looked at again; the files' pages need not, nor what
    was freed on the way here. Those of the first work go as well, when the process rests after it, and those
    of ten times as much, and so on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)
    gc.enable()
    _let_go()
    threading.Thread(target=_trim_when_idle, name="let-go-at-rest", daemon=True).start()


def give_back_freed() -> None:
    """Return to the system what was freed: an allocator keeps it for later, and weights come but once.

    Does nothing where the C library is not glibc (malloc_trim(3))."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def await_rest_after(
    work_s: float, cpu_s: Callable[[], float] = time.process_time, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Return when the process has worked for so long, and then has rested from one look to the next.

    ``cpu_s``: the time that it has used so far, of all cores."""
    now = cpu_s()
    worked_at = now + work_s
    resting = False
    while now < worked_at or not resting:
        before = now
        sleep(LOOK_EVERY_S)
        now = cpu_s()
        resting = now - before <= REST_S


def _let_go() -> None:
    drop_file_pages()
    give_back_freed()


def _trim_when_idle() -> None:
    work_s = FIRST_WORK_S
    while True:
        await_rest_after(work_s)
        _let_go()
        work_s *= MORE_WORK

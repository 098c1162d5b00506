"""Which CPUs each thread of a step computes on: a core of its own, where there is one for each.

Threads of a step wait for each other a hundred times. Where other work comes and goes, the system puts two of
them on one core and leaves them there for milliseconds, another free, each waiting for its turn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

TOLD_BY_USER = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""What may say where threads run, in an environment."""
MAX_CPUS = 1024
"""As ``cpu_set_t`` has them."""
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def usable_cpus() -> frozenset[int]:
    """Those on which the calling thread may run; none where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def cores_for(num_threads: int, siblings: str = _SIBLINGS) -> Sequence[frozenset[int]]:
    """The CPUs of each thread's core. None if there are more or fewer cores than threads, for then others
    may have chosen theirs among the same, or if the user's environment says where threads run.

    ``siblings``: the file that names the CPUs of CPU {}'s core."""
    if num_threads < 2 or any(name in os.environ for name in TOLD_BY_USER):
        return ()
    cpus = usable_cpus()
    cores = sorted({_core(cpu, siblings) & cpus for cpu in cpus}, key=min)
    return cores if len(cores) == num_threads and max(cpus) < MAX_CPUS else ()


def _core(cpu: int, siblings: str) -> frozenset[int]:
    """The CPUs that share a core with this one; itself alone where the system does not tell."""
    with suppress(OSError, ValueError):
        return _parsed(Path(siblings.format(cpu)).read_text(encoding="ascii")) | {cpu}
    return frozenset({cpu})


def _parsed(text: str) -> frozenset[int]:
    """A list of numbers as Linux writes it: ``0-1,8``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)

"""Chooses the CPUs of each thread of a step: a separate core, if there is one for each thread.

Threads of a step synchronize a hundred times. As other processes start and end, the system often puts two of
the threads on one core for milliseconds and leaves another core idle.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

AFFINITY_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables by which a user pins threads."""
MAX_CPUS = 1024
"""The size of ``cpu_set_t`` in bits."""
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def usable_cpus() -> frozenset[int]:
    """The CPUs on which the calling thread may run; empty where the system does not report them."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def cores_for(num_threads: int, siblings: str = _SIBLINGS) -> Sequence[frozenset[int]]:
    """The CPUs of each thread's core. Empty if the number of cores differs from the number of threads,
    because other processes may then have chosen the same cores, or if the user's environment pins threads.

    ``siblings``: the file that lists the CPUs of the core of CPU {}.
    """
    if num_threads < 2 or any(name in os.environ for name in AFFINITY_VARIABLES):
        return ()
    cpus = usable_cpus()
    cores = sorted({_core(cpu, siblings) & cpus for cpu in cpus}, key=min)
    return cores if len(cores) == num_threads and max(cpus) < MAX_CPUS else ()


def share_of_cores(index: int, count: int, siblings: str = _SIBLINGS) -> frozenset[int]:
    """The CPUs of one of ``count`` processes on this machine, ``index`` from 0: an equal number of whole
    cores for each, or one shared core if there are more processes than cores."""
    cpus = usable_cpus()
    cores = sorted({_core(cpu, siblings) & cpus for cpu in cpus}, key=min)
    if not cores:
        return frozenset()
    if count >= len(cores):
        return cores[index % len(cores)]
    each = len(cores) // count
    return frozenset().union(*cores[index * each : (index + 1) * each])


def _core(cpu: int, siblings: str) -> frozenset[int]:
    """The CPUs that share a core with this one; just this one where the system does not report them."""
    with suppress(OSError, ValueError):
        return _parsed(Path(siblings.format(cpu)).read_text(encoding="ascii")) | {cpu}
    return frozenset({cpu})


def _parsed(text: str) -> frozenset[int]:
    """Parse a list of numbers as Linux writes it: ``0-1,8``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)

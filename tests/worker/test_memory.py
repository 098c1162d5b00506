"""Memory that is populated in the background belongs only to its holder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from engine.worker import memory

pytestmark = pytest.mark.slow

STATM = Path("/proc/self/statm")
POOLS_LET_GO = """
import torch
from engine.worker import memory

memory.BACKGROUND_DELAY_S = 0.0
pools = [memory.zeros_on_host((2**26,), torch.uint8) for _ in range(24)]
pools.clear()
"""


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not STATM.exists(), reason="the kernel does not tell")
def test_a_pool_goes_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool is freed with its holder, also before it was populated."""
    others = set(threading.enumerate())
    monkeypatch.setattr(memory, "BACKGROUND_DELAY_S", 3600.0)
    pool = memory.zeros_on_host((2**28,), torch.uint8)
    pool.fill_(1)
    before = resident_bytes()
    del pool
    assert before - resident_bytes() > 2**27
    [waits] = set(threading.enumerate()) - others
    assert isinstance(waits, threading.Timer)
    waits.cancel()


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="the system has no priorities of threads")
def test_background_work_has_the_usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the memory-map lock: with a low priority, other processes would keep it off its core while
    every thread of this one waits."""
    seen = []

    def sleep(seconds: float) -> None:
        seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    monkeypatch.setattr(memory, "BACKGROUND_DELAY_S", 0.0)
    monkeypatch.setattr(time, "sleep", sleep)
    others = set(threading.enumerate())
    pool = memory.zeros_on_host((2**26,), torch.uint8)
    for thread in set(threading.enumerate()) - others:
        thread.join()
    assert pool.count_nonzero() == 0
    assert len(seen) == 2**26 // memory._HUGE_PAGE
    assert set(seen) == {os.getpriority(os.PRIO_PROCESS, 0)}


@pytest.mark.long
def test_a_program_may_end_while_pools_are_made_ready() -> None:
    """A program that used an ``LLM`` for a moment may; if its threads freed tensors, it could abort."""
    done = subprocess.run([sys.executable, "-c", POOLS_LET_GO], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

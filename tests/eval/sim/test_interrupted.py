"""What ``continuum simulate`` leaves when a user ends it, or the system kills one of its processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LONG = ["--workload", "swe-bench", "--jobs", "400", "--rate", "0.5", "--seeds", "8", "--processes", "2"]
"""Minutes of work."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"),
]


@pytest.fixture
def simulation() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "continuum.cli", "simulate", *LONG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def _workers(process: subprocess.Popen[str], count: int) -> list[int]:
    """Process ids of the worker processes, once there are ``count``."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        processes = [pid for pid in Path("/proc").iterdir() if pid.name.isdigit()]
        found = [pid for pid in processes if _is_worker(pid, process.pid)]
        if len(found) >= count:
            return [int(pid.name) for pid in found]
    raise AssertionError("the simulation began no processes")


def _is_worker(pid: Path, parent: int) -> bool:
    """Whether it was forked from the parent; short-lived commands of the parent have another command line."""
    try:
        is_child = int((pid / "stat").read_text().rpartition(")")[2].split()[1]) == parent
        return is_child and (pid / "cmdline").read_bytes() == Path(f"/proc/{parent}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_its_processes_end_with_it(simulation: subprocess.Popen[str], number: int, code: int) -> None:
    """However it is ended, its processes end at once, without a traceback, as their pipes are closed."""
    _workers(simulation, 2)
    simulation.send_signal(number)
    _, told = simulation.communicate(timeout=20)
    assert simulation.returncode == code
    assert "Traceback" not in told


def test_a_killed_process_is_one_sentence(simulation: subprocess.Popen[str]) -> None:
    """If the system kills a process, as for lack of memory, the command gives exit code 1 and advice."""
    worker, *_ = _workers(simulation, 2)
    subprocess.run(["kill", "-9", str(worker)], check=True)
    _, told = simulation.communicate(timeout=20)
    assert simulation.returncode == 1
    assert told.startswith("continuum: A process that simulated was killed")
    assert len(told.splitlines()) == 1

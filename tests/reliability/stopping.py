"""Kills, stops or terminates processes at chosen moments: ``python -m tests.reliability.stopping``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.api.server import is_alive
from tests.processes.crowd import Crowd
from tests.reliability.attacked import attacked_server

ENDLESS = {"prompt": "a", "max_tokens": 3500, "ignore_eos": True, "stream": True}
START_UP_DELAYS_S = (0.3, 1.0, 2.0)


def main() -> int:
    """Returns 1 if any promise was broken."""
    faults = _told_to_go() + _standing_still() + _left_behind() + _interrupted()
    print(f"stopping: {faults} promises broken")
    return 1 if faults else 0


def _told_to_go() -> int:
    """Sends SIGTERM to one of three API servers with open streams; other requests must succeed."""
    with attacked_server("--api-server-count", "3") as server, ExitStack() as streams:
        for _ in range(12):
            client = streams.enter_context(httpx.Client(base_url=server.url, timeout=60))
            streams.enter_context(client.stream("POST", "/v1/completions", json=ENDLESS))
        os.kill(Crowd(server).front_end_pids()[0], signal.SIGTERM)
        statuses: Counter[int] = Counter()
        deadline = time.monotonic() + 4.5
        while time.monotonic() < deadline:
            statuses[_status(server.url)] += 1
        print(f"stopping: after SIGTERM to one of three front ends /health answers {dict(statuses)}")
        return int(statuses.keys() != {200})


def _standing_still() -> int:
    """Sends SIGSTOP to the core."""
    with attacked_server() as server:
        os.kill(server.core_pid(), signal.SIGSTOP)
        time.sleep(7)
        stopped = _status(server.url)
        os.kill(server.core_pid(), signal.SIGCONT)
        goes_on = _within(5, lambda: _status(server.url) == 200)
        print(f"stopping: a core stopped for 7 s: /health {stopped}; goes on afterwards: {goes_on}")
        return int(stopped != 503) + int(not goes_on)


def _left_behind() -> int:
    """Kills all processes at once with kill -9, and starts the server again."""
    temporary = tempfile.mkdtemp(prefix="attacked-")
    environment = {"TMPDIR": temporary}
    try:
        with attacked_server("--api-server-count", "2", environment=environment) as server:
            pids = Crowd(server).all_pids()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            assert _within(5, lambda: not any(map(is_alive, pids[1:])))
        left = _folders(temporary)
        with attacked_server("--api-server-count", "2", environment=environment):
            after = _folders(temporary) - 2  # the new server's own
        print(f"stopping: kill -9 of all left {left} folders; {after} of them after the next start")
        return int(after > 0)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _interrupted() -> int:
    """Sends SIGINT and SIGTERM during the start."""
    faults = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        for delay_s in START_UP_DELAYS_S:
            process = subprocess.Popen(
                [sys.executable, "-m", "continuum.cli", "serve", "--host", "127.0.0.1", "--port", "0"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            time.sleep(delay_s)
            process.send_signal(number)
            told = process.communicate(timeout=20)[1]
            faults += "Traceback" in told
            print(
                f"stopping: {number.name} {delay_s} s after the start: exit {process.returncode} {told!r:.80}"
            )
    return faults


def _folders(temporary: str) -> int:
    return sum(path.name.startswith(("continuum-", "engine-")) for path in Path(temporary).iterdir())


def _status(url: str) -> int:
    try:
        return httpx.get(f"{url}/health", timeout=4).status_code
    except httpx.HTTPError:
        return 0


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())

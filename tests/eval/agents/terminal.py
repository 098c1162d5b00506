"""A person at a terminal: runs a command under a pseudo-terminal, types and reads."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LAUNCH = (
    "import fcntl, signal, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"  # Makes Ctrl-C a signal to it.
    # Background jobs inherit SIGINT ignored; so would this command.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from continuum.cli.main import main\n"
    "sys.exit(main(sys.argv[1:]))"
)
TIMEOUT_S = 90.0


class Person:
    """Types, and waits for what is shown."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self.shown = ""
        self.is_there = True
        self._terminal = terminal
        self._read = 0

    def types(self, line: str) -> None:
        os.write(self._terminal, line.encode() + b"\r")

    def presses(self, key: bytes) -> None:
        os.write(self._terminal, key)

    def awaits_a_key(self) -> None:
        """Waits until the program sleeps: it shows its prompt shortly before, and Python's line editor misses
        a signal that arrives in between."""
        deadline = time.monotonic() + TIMEOUT_S
        while _state(self.process.pid) != "S":
            assert time.monotonic() < deadline, "it does not come to rest"

    def sees(self, text: str, timeout_s: float = TIMEOUT_S) -> str:
        """Waits until ``text`` is shown; returns everything shown from the last match to its end."""
        deadline = time.monotonic() + timeout_s
        while (found := self.shown.find(text, self._read)) < 0:
            assert time.monotonic() < deadline, f"never shown: {text!r}; but:\n{self.shown[self._read :]}"
            assert self._wait(), f"it ended without showing {text!r}:\n{self.shown[self._read :]}"
        start, self._read = self._read, found + len(text)
        return self.shown[start : self._read]

    def ends(self, timeout_s: float = TIMEOUT_S) -> int:
        """Waits for the end; returns the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._wait():
            assert time.monotonic() < deadline, f"it does not end:\n{self.shown[self._read :]}"
        return self.process.wait(timeout_s)

    def hangs_up(self) -> int:
        """Closes the terminal; returns the exit code."""
        os.close(self._terminal)
        self.is_there = False
        return self.process.wait(TIMEOUT_S)

    def _wait(self) -> bool:
        """Reads what is shown within a second; False if nothing more can come."""
        if not select.select([self._terminal], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._terminal, 65536)
        except OSError:  # The other side is closed.
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)


def _state(pid: int) -> str:
    """The state of a process in /proc: R is running, S is sleeping."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def at_a_terminal(*arguments: str, **environment: str) -> Iterator[Person]:
    """Runs ``continuum`` with these arguments; always kills it at the end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", _LAUNCH, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **environment},
    )
    os.close(theirs)
    person = Person(process, ours)
    try:
        yield person
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        if person.is_there:
            os.close(ours)

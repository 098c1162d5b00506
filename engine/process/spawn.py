"""Starts a process of the server from another one."""

from __future__ import annotations

import pickle
import sys

# A new interpreter instead of multiprocessing's spawn: it does not run the user's script again, so a script
# needs no ``if __name__ == "__main__"``, and it works from a notebook or standard input too. A terminal sends
# SIGINT to the whole process group: only the process that the user started handles it.
_BOOTSTRAP = """\
import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)
import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer)
from {module} import main; main()
"""


def spawn_command(module: str) -> list[str]:
    """The command that runs ``main`` of a module; its standard input must begin with the pickled sys.path."""
    return [sys.executable, "-P", "-c", _BOOTSTRAP.format(module=module)]


def spawn_input(message: bytes) -> bytes:
    """The standard input of such a process: the pickled sys.path, then a message for ``main``."""
    return pickle.dumps(sys.path) + message

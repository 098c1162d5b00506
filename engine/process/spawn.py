"""How a process of ours begins another one."""

from __future__ import annotations

import sys

# A new interpreter instead of multiprocessing's spawn: it does not run the user's script again, so a script
# needs no ``if __name__ == "__main__"``, and it works from a notebook or standard input too. SIGINT of a
# terminal goes to the whole group: the front end decides what it means.
_BOOTSTRAP = """\
import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)
import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer)
from {module} import main; main()
"""


def spawn_command(module: str) -> list[str]:
    """Command of a process that runs ``main`` of a module; its standard input first brings our sys.path."""
    return [sys.executable, "-P", "-c", _BOOTSTRAP.format(module=module)]

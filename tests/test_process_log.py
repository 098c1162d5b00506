"""Log lines are only ours: no name in a request forges a line, or sends commands to the terminal."""

from __future__ import annotations

import subprocess
import sys

LOGGED = r"""
import logging
from engine.process.process_log import begin_log
begin_log(logging.INFO, "core 1")
logging.getLogger("engine.x").info("The job %s has ended", "\x1b[31mred\nERROR engine.y: forged")
try:
    raise ValueError("\x1b]0;title\x07")
except ValueError:
    logging.getLogger("engine.x").exception("A request failed")
"""


def test_names_are_escaped_and_tracebacks_keep_their_lines() -> None:
    done = subprocess.run([sys.executable, "-c", LOGGED], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    assert lines[0] == (r"INFO engine.x (core 1): The job \u001b[31mred\nERROR engine.y: forged has ended")
    assert lines[1] == "ERROR engine.x (core 1): A request failed"
    assert lines[-1] == r"ValueError: \u001b]0;title\u0007"
    assert len(lines) > 4

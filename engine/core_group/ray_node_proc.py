"""The process of a node that an actor of Ray started: it ends when the actor does."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading

from engine.core_group.headless import run_headless
from engine.core_group.ray_node_actor import NodeStart
from engine.errors import EngineError
from engine.process.process_log import begin_log, start_log


def main() -> None:
    """Run the node. Standard input has a ``NodeStart``, and then nothing until the actor has ended."""
    start: NodeStart = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_stop_with_actor, name="actor-watch", daemon=True).start()
    begin_log(start.log_level, f"node {os.getpid()}", shows_start=False)
    try:
        sys.exit(run_headless(pickle.loads(start.spec)))
    except EngineError as error:
        start_log.error("%s", error)
        sys.exit(2)


def _stop_with_actor() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)

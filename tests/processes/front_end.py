"""A frontend process to be killed: starts a core, prints the core's pid, then stays in one state.

Run as ``python -m tests.processes.front_end STATE FOLDER``; STATE is idle, busy or stuck.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from engine.core_process.core_client import SyncMPClient
from engine.testing import FakeExecutorFactory
from tests.processes.support import SignalPolicyFactory, config, core_request


def main(state: str, folder: Path) -> None:
    # Tests that run in the background start their processes with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gate = folder / "gate"
    if state == "stuck":
        os.mkfifo(gate)
    client = SyncMPClient(
        config(trace_path=str(folder / "trace.jsonl")),
        FakeExecutorFactory(gate=gate if state == "stuck" else None),
        SignalPolicyFactory(folder / "closed"),
    )
    client.await_ready()
    if state != "idle":
        client.add_request(core_request("a-0"))
    if state == "busy":
        client.get_output()
    print(client.pid, flush=True)
    count = 0
    while True:
        message = client.get_output()
        if any(output.finished for output in message.outputs):
            count += 1
            client.add_request(core_request(f"a-{count}"))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

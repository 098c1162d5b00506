"""Traces for tests, made in a second by the simulator's own command, with the results that it printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from continuum.cli.main import main

POOL_TOKENS = 10_000
"""Fewer tokens than the jobs need at once: some wait, some are preempted, and pins end in every way."""


@dataclass(frozen=True, slots=True)
class SimulatedTrace:
    """The files of one run."""

    path: Path
    result: dict[str, Any]
    """The run in the output of ``--json``."""


def simulate(folder: Path, policy: str, *flags: str, name: str = "trace.jsonl") -> SimulatedTrace:
    folder.mkdir(parents=True, exist_ok=True)
    path, result = folder / name, folder / "result.json"
    command = ["simulate", "--workload", "swe-bench:turns=0.5,tokens=0.15", "--jobs", "14", "--rate", "2"]
    command += ["--gpu", "h100", "--kv-tokens", str(POOL_TOKENS), "--max-num-seqs", "8", "--processes", "1"]
    command += ["--policies", policy, "--json", str(result), "--trace", str(path), *flags]
    assert main(command) == 0
    (run,) = json.loads(result.read_text())["runs"]
    return SimulatedTrace(path, run)

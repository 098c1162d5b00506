"""The stored trace, which other machines replay.

``python -m tests.eval.trace.kept_trace`` rewrites it, which is necessary after changes to the policy's
decisions or options.
"""

from __future__ import annotations

from pathlib import Path

from continuum.cli.main import main

KEPT = Path(__file__).parent / "kept.jsonl.zst"

_MIX = "swe-bench:turns=0.5,tokens=0.1+bfcl:turns=0.2,tokens=0.05"
_JOBS = ["--workload", _MIX, "--jobs", "20", "--rate", "3", "--max-turns", "8"]
_ENGINE = ["--kv-tokens", "8000", "--max-num-seqs", "6", "--max-num-batched-tokens", "512", "--lessons"]


def write(path: Path) -> None:
    """Runs enough jobs to learn costs, durations and remaining work, in a pool small enough that they
    matter."""
    assert main(["simulate", *_JOBS, *_ENGINE, "--policies", "continuum", "--trace", str(path)]) == 0


if __name__ == "__main__":
    write(KEPT)

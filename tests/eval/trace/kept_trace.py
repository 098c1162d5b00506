"""The trace that is kept, for other machines to decide again.

``python -m tests.eval.trace.kept_trace`` writes it anew,
which a change of what the policy decides or of its options makes necessary.
"""

from __future__ import annotations

from pathlib import Path

from eval.cli.main import main

KEPT = Path(__file__).parent / "kept.jsonl.zst"

_MIX = "swe-bench:turns=0.5,tokens=0.1+bfcl:turns=0.2,tokens=0.05"
_JOBS = ["--workload", _MIX, "--jobs", "20", "--rate", "3", "--max-turns", "8"]
_ENGINE = ["--kv-tokens", "8000", "--max-num-seqs", "6", "--max-num-batched-tokens", "512", "--lessons"]


def write(path: Path) -> None:
    """Jobs enough that costs, durations and remaining work are learned; so small a pool that it matters."""
    assert main(["simulate", *_JOBS, *_ENGINE, "--policies", "continuum", "--trace", str(path)]) == 0


if __name__ == "__main__":
    write(KEPT)

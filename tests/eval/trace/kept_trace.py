"""The trace that is kept, for other machines to decide again.

``python -m tests.eval.trace.kept_trace`` writes it anew,
which a change of what the policy decides or of its options makes necessary.
"""

from __future__ import annotations

from pathlib import Path

from eval.cli.main import main

KEPT = Path(__file__).parent / "kept.jsonl.zst"

_JOBS = ["--workload", "swe-bench:turns=0.5,tokens=0.1", "--jobs", "8", "--rate", "3", "--max-turns", "8"]
_ENGINE = ["--kv-tokens", "8000", "--max-num-seqs", "6", "--max-num-batched-tokens", "512"]


def write(path: Path) -> None:
    """Jobs enough that costs, durations and kinds of jobs are learned, in a pool so small that it matters."""
    assert main(["simulate", *_JOBS, *_ENGINE, "--policies", "continuum", "--trace", str(path)]) == 0


if __name__ == "__main__":
    write(KEPT)

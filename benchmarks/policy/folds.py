"""``python -m benchmarks.policy.folds``: halves recordings, each with a state learned from the other half.

So a policy that has learned is judged by jobs of tasks that it did not learn from: run the grid once in each
folder, with ``--policies ...,continuum:estimator_state=FOLDER/learned.json``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from continuum.cli.main import main as continuum
from estimator.learned.work_trainer import judge
from estimator.state import load_learned
from eval.learn.calls import played
from eval.learn.past_jobs import past_jobs
from eval.workloads.catalog import open_workload
from eval.workloads.job import Job
from eval.workloads.recorded import write_jobs

RECORDINGS = ("agentcgroup-claude", "agentcgroup-glm", "kv-cache-tester")
NUM_FOLDS = 2
LEARNED = "learned.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes ``OUT/0`` and ``OUT/1``: recordings, and a state learned from the other half."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policy.folds", description=__doc__)
    parser.add_argument("--workloads", type=Path, required=True, help="Folder of the recordings")
    parser.add_argument("--out", type=Path, required=True, help="Folder to make")
    arguments = parser.parse_args(argv)
    for fold in range(NUM_FOLDS):
        folder = arguments.out / str(fold)
        rest = folder / "rest"
        rest.mkdir(parents=True, exist_ok=True)
        for name in RECORDINGS:
            held_out, others = _parted(arguments.workloads / f"{name}.jsonl", fold)
            write_jobs(folder / f"{name}.jsonl", held_out)
            write_jobs(rest / f"{name}.jsonl", others)
        sources = [str(rest / f"{name}.jsonl") for name in RECORDINGS]
        code = continuum(["learn", *sources, "--gap-cap-s", "600", "--out", str(folder / LEARNED)])
        if code:
            return code
        _tell(fold, folder)
    return 0


def _tell(fold: int, folder: Path) -> None:
    """Prints the share of pairs of held-out jobs that are ordered correctly."""
    model = load_learned(folder / LEARNED).work_model
    assert model is not None
    for name in RECORDINGS:
        judged = judge(model, past_jobs(open_workload(str(folder / f"{name}.jsonl")).sample(None, None).jobs))
        print(f"half {fold}, {name}: {judged.right:.3f} ordered rightly, by age {judged.right_by_age:.3f}")


def _parted(path: Path, fold: int) -> tuple[list[Job], list[Job]]:
    """Returns the jobs of every NUM_FOLDS-th group (held out), and those of the others."""
    jobs = open_workload(str(path)).sample(None, None).jobs
    groups = [job.group for job in played(jobs)]
    chosen = set(sorted(set(groups))[fold::NUM_FOLDS])
    held_out = [job for job, group in zip(jobs, groups, strict=True) if group in chosen]
    return held_out, [job for job, group in zip(jobs, groups, strict=True) if group not in chosen]


if __name__ == "__main__":
    sys.exit(main())

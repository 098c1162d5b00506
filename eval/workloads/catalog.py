"""Chooses the jobs of a run: a file or ``synthetic``, how many, in which order."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

from eval.errors import WorkloadError
from eval.workloads.job import Job
from eval.workloads.miniswe import read_miniswe
from eval.workloads.synthetic import SyntheticConfig, make_jobs

SYNTHETIC = "synthetic"
NUM_SYNTHETIC_JOBS = 8


def load_jobs(workload: str, num_jobs: int | None, seed: int | None) -> list[Job]:
    """``num_jobs`` jobs of a workload (all by default); with a seed, drawn at random from the file."""
    if workload == SYNTHETIC:
        return make_jobs(SyntheticConfig(num_jobs=num_jobs or NUM_SYNTHETIC_JOBS, seed=seed or 0))
    jobs = list(islice(read_miniswe(Path(workload)), num_jobs if seed is None else None))
    if not jobs:
        raise WorkloadError(f"The workload {workload} holds no jobs.")
    if num_jobs is not None and num_jobs > len(jobs):
        raise WorkloadError(f"--jobs asks for {num_jobs} jobs, but {workload} holds {len(jobs)}.")
    if seed is None:
        return jobs
    return random.Random(seed).sample(jobs, num_jobs or len(jobs))

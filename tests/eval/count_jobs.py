"""Jobs that have token counts only, as most recordings do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from eval.workloads.job import GapKind, Job, ToolRun, Turn
from eval.workloads.recorded import write_jobs

OUTPUT = 12


def count_job(
    job_id: str, inputs: tuple[int, ...] = (100, 150, 230), gap_s: float = 0.01, output: int = OUTPUT
) -> Job:
    """A job with prompts of these lengths; each contains the whole previous turn."""
    turns = [
        Turn(
            input_tokens=tokens,
            prefix_tokens=inputs[index - 1] + output if index else 0,
            output_tokens=output,
            gap_kind=GapKind.TOOL,
            gap_s=gap_s,
            gap_measured=True,
            calls=(ToolRun("Bash", "ls", gap_s),),
        )
        for index, tokens in enumerate(inputs)
    ]
    turns[-1] = replace(turns[-1], gap_kind=GapKind.END, gap_s=None, gap_measured=False, calls=())
    return Job(job_id=job_id, source="made", turns=tuple(turns))


def written(path: Path, *jobs: Job) -> str:
    """Writes a file of these jobs, for a command line."""
    write_jobs(path, jobs)
    return str(path)

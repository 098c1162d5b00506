"""Hand-made runs for tests of tables and plots."""

from __future__ import annotations

from eval.load.records import EngineCounters, JobRecord, Occupancy, TurnRecord
from eval.report.metrics import RunResult, RunSetting, summarize


def turn(job_id: str, number: int, start_s: float, ttft_s: float = 1.0, **fields: object) -> TurnRecord:
    """An answered turn of one second after its first token, with 100 prompt and 10 output tokens."""
    record = TurnRecord(
        job_id=job_id,
        turn=number,
        start_s=start_s,
        latency_s=ttft_s + 1.0,
        ttft_s=ttft_s,
        prompt_tokens=100,
        output_tokens=10,
        as_recorded=True,
        tool="bash",
    )
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def job(job_id: str, start_s: float, end_s: float, error: str | None = None) -> JobRecord:
    """A job of two turns."""
    return JobRecord(
        job_id=job_id,
        start_s=start_s,
        end_s=end_s,
        num_turns=2,
        num_planned_turns=2,
        num_recorded_turns=2,
        error=error,
    )


def run(
    name: str,
    completion_s: float,
    *,
    seed: int | None = 0,
    jobs_per_s: float | None = None,
    num_jobs: int = 4,
    cached_tokens: int = 0,
    counters: EngineCounters | None = None,
    **setting: object,
) -> RunResult:
    """A run of jobs of two turns, one arriving each second, each taking ``completion_s``."""
    jobs = [job(f"job-{i}", float(i), i + completion_s) for i in range(num_jobs)]
    turns = [turn(each.job_id, 1, each.start_s) for each in jobs]
    turns += [
        turn(
            each.job_id,
            2,
            each.end_s - 2.0,
            cached_tokens=cached_tokens,
            recomputed_tokens=100 - cached_tokens,
        )
        for each in jobs
    ]
    fields = {"model": "m", "simulated": True, "workload": "w.jsonl", **setting}
    return summarize(
        RunSetting(name=name, seed=seed, jobs_per_s=jobs_per_s, **fields),  # type: ignore[arg-type]
        jobs,
        turns,
        counters or EngineCounters(block_size=16, num_blocks=100, num_preemptions=0),
        occupancy=Occupancy(
            time_s=[0.0, 1.0, 2.0],
            running=[0, 60, 20],
            pinned=[0, 10, 0],
            cached=[0, 10, 60],
            free=[100, 20, 20],
            num_running=[0, 2, 1],
            num_waiting=[0, 1, 0],
        ),
        notes=["tool times: 5 ASSUMED"],
        detail=True,
    )

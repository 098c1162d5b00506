"""Sixteen recorded agent jobs at once through the command line: the benefit of pins on real input."""

from __future__ import annotations

from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.load.records import told
from eval.report.results import read_results
from eval.workloads.catalog import load_jobs

pytestmark = [pytest.mark.slow, pytest.mark.long]

RECORDED = Path(__file__).parents[3] / "shared" / "workloads" / "miniswe-gemini3-text.jsonl"


@pytest.mark.shared
@pytest.mark.timeout(300)
def test_sixteen_jobs_at_once_recompute_less_under_continuum(tmp_path: Path) -> None:
    """There is no error, every block is free at the end, and fewer tokens are recomputed than under fcfs with
    the same pool."""
    if not RECORDED.exists():
        pytest.skip("the recorded jobs (../shared/workloads) are not here")
    arguments = [
        *("demo", "--workload", str(RECORDED), "--jobs", "16", "--max-turns", "3", "--out", str(tmp_path)),
        *("--hidden-size", "64", "--layers", "1", "--time-scale", "0.2", "--pool-share", "0.4"),
        *("--max-context-tokens", "8000"),
    ]
    assert main(arguments) == 0
    (fcfs,) = read_results(tmp_path / "fcfs" / "result.json").runs
    (continuum,) = read_results(tmp_path / "continuum" / "result.json").runs
    for result in (fcfs, continuum):
        assert (result.num_jobs, result.num_errors) == (16, 0)
        assert result.kv_usage_at_end == 0
    assert told(continuum.recomputed_tokens) < 0.5 * told(fcfs.recomputed_tokens)
    assert continuum.pins_ended["handed_over"] > 0
    # The engine's trace and the client's records have the same jobs, and both can be run again.
    traced, recorded = (
        load_jobs(str(tmp_path / "continuum" / file), None, None) for file in ("trace.jsonl", "records.jsonl")
    )
    counts = [
        sorted((turn.input_tokens, turn.output_tokens) for job in jobs for turn in job.turns)
        for jobs in (traced, recorded)
    ]
    assert len(traced) == len(recorded) == 16
    assert counts[0] == counts[1]

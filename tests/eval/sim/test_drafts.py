"""Drafts in the simulator add tokens according to counts; without them nothing changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.errors import WorkloadError
from eval.sim.drafts import read_draft_counts


def write_counts(path: Path, pairs: list[tuple[int, int, int]]) -> Path:
    path.write_text(json.dumps([{"drafter": "made", "turns": "all", "steps_by_drafts": pairs}]))
    return path


def simulate(out: Path, *more: str) -> tuple[int, int, float]:
    """Returns turns, output tokens, and the mean completion time of a job."""
    asked = ["simulate", "--workload", "synthetic", "--jobs", "6", "--rate", "0.5", "--policies", "fcfs"]
    assert main([*asked, "--json", str(out), *more]) == 0
    (run,) = json.loads(out.read_text())["runs"]
    return run["num_turns"], run["output_tokens"], run["job_completion_s"]["mean"]


def test_drafts_shorten_jobs_and_change_no_output(tmp_path: Path) -> None:
    """With three drafts that are always accepted, jobs end sooner with the same output."""
    counts = write_counts(tmp_path / "counts.json", [(3, 3, 1)])
    *said, without_s = simulate(tmp_path / "without.json")
    *said_too, with_s = simulate(tmp_path / "with.json", "--drafts", str(counts))
    assert said_too == said
    assert with_s < without_s - 0.5


def test_a_trace_tells_what_drafts_brought(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two of three drafts are accepted, except at the end of an answer."""
    counts = write_counts(tmp_path / "counts.json", [(3, 2, 1)])
    trace = str(tmp_path / "trace.jsonl")
    simulate(tmp_path / "out.json", "--drafts", str(counts), "--trace", trace)
    capsys.readouterr()
    assert main(["trace", "summary", trace, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    drafts = summary["drafts"]
    assert drafts["accepted_by_place"] == pytest.approx([1, 1], abs=0.1)
    assert drafts["tokens_per_draft"] == pytest.approx(3, abs=0.1)
    num_steps = summary["output_tokens"] - drafts["accepted_tokens"]
    assert drafts["tokens_per_step"] == summary["output_tokens"] / num_steps
    assert 2.5 < drafts["tokens_per_step"] < 3


def test_counts_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Tokens per step are one plus the accepted drafts."""
    counts = read_draft_counts(write_counts(tmp_path / "counts.json", [(0, 0, 2), (4, 1, 1), (4, 4, 1)]))
    assert counts.tokens_per_step == pytest.approx(1 + 5 / 4)


@pytest.mark.parametrize("content", ["", "[]", "{}", '[{"drafter": "x", "turns": "all"}]'])
def test_a_file_without_counts_is_named(tmp_path: Path, content: str) -> None:
    """The file is named in one sentence before anything runs."""
    path = tmp_path / "counts.json"
    path.write_text(content)
    with pytest.raises(WorkloadError, match=r"counts.json has no counts of drafts"):
        read_draft_counts(path)


def test_more_accepted_than_drafted_is_refused(tmp_path: Path) -> None:
    """A file with such counts counts something else, and is refused."""
    path = write_counts(tmp_path / "counts.json", [(1, 2, 1)])
    with pytest.raises(WorkloadError, match="has no counts"):
        read_draft_counts(path)

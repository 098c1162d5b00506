"""What a reader sees: one table, the ratio of two runs, and what was assumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.metrics import BenchResult, Distribution
from eval.report import main, read_result, render, write_result


def _result(name: str, mean_s: float, recomputed: int, **pins: int) -> BenchResult:
    spread = Distribution(count=4, mean=mean_s, p50=mean_s, p95=mean_s, p99=mean_s, max=mean_s)
    return BenchResult(
        name=name,
        model="m",
        num_jobs=4,
        num_completed_jobs=4,
        num_cut_jobs=0,
        num_turns=20,
        num_errors=0,
        num_unlike_recording=0,
        wall_s=30.0,
        job_completion_s=spread,
        ttft_s=spread,
        first_ttft_s=spread,
        returning_ttft_s=None,
        prompt_tokens=1000,
        cached_tokens=250,
        recomputed_tokens=recomputed,
        output_tokens=100,
        num_preemptions=None,
        num_pinned_turns=0,
        pins_ended=pins,
        notes=["tool times: 5 ASSUMED"],
    )


def _row(table: str, label: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(label)]
    return line.removeprefix(label).split()


def test_two_results_stand_side_by_side_with_their_ratio() -> None:
    """Each number is in its column, the second over the first is in the last, unknown ones are a dash."""
    table = render([_result("fcfs", 20.0, 4000), _result("continuum", 10.0, 1000, handed_over=12, expired=3)])
    assert table.splitlines()[0].split() == ["fcfs", "continuum", "continuum", "/", "fcfs"]
    assert _row(table, "job completion, mean s") == ["20.00", "10.00", "0.50x"]
    assert _row(table, "  recomputed") == ["4,000", "1,000", "0.25x"]
    assert _row(table, "  from cache, %") == ["25.0", "25.0", "1.00x"]
    assert _row(table, "  pins handed over") == ["0", "12", "-"]
    assert _row(table, "preemptions") == ["-", "-", "-"]
    assert _row(table, "TTFT returning turn, mean s") == ["-", "-", "-"]


def test_assumptions_are_printed_once_below_the_table() -> None:
    """A reader who quotes a number has seen what was not measured."""
    table = render([_result("a", 1.0, 0), _result("b", 1.0, 0)])
    assert table.count("tool times: 5 ASSUMED") == 1
    assert "up to one KV block a turn" in table


def test_answers_unlike_the_recording_and_cut_jobs_are_said() -> None:
    """A server that ignores forced tokens, or jobs that did not fit, are not passed over."""
    result = _result("other", 1.0, 0)
    result.num_unlike_recording, result.num_cut_jobs = 7, 2
    table = render([result])
    assert "7 answers differ from the recording" in table
    assert "2 of 4 jobs were cut" in table


def test_results_on_disk_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m eval.report A B`` prints what two runs of ``bench --json`` left."""
    for name in ("a", "b"):
        write_result(tmp_path / name / "result.json", _result(name, 2.0, 5))
    assert read_result(tmp_path / "a" / "result.json") == _result("a", 2.0, 5)
    assert main([str(tmp_path / "a" / "result.json"), str(tmp_path / "b" / "result.json")]) == 0
    assert _row(capsys.readouterr().out, "job completion, mean s") == ["2.00", "2.00", "1.00x"]


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_file_that_is_no_result_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    """Exit code 1 and the file's name, not a traceback."""
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    assert main([str(path)]) == 1
    assert "x.json" in capsys.readouterr().err

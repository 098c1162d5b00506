"""What a reader sees: one table, the ratio of two runs, and what was assumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.records import EngineCounters
from eval.report import main, render
from eval.results import ResultFile, write_results
from tests.eval.hand_made import run


def _row(table: str, label: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(label)]
    return line.removeprefix(label).split()


def test_two_results_stand_side_by_side_with_their_ratio() -> None:
    """Each number is in its column, the second over the first is in the last, unknown ones are a dash."""
    pinning = EngineCounters(pins_ended={"handed_over": 12, "expired": 3})
    table = render([run("fcfs", 20.0), run("continuum", 10.0, cached_tokens=75, counters=pinning)])
    assert table.splitlines()[0].split() == ["fcfs", "continuum", "continuum", "/", "fcfs"]
    assert _row(table, "job completion, mean s") == ["20.00", "10.00", "0.50x"]
    assert _row(table, "  recomputed") == ["400", "100", "0.25x"]
    assert _row(table, "  pins handed over") == ["0", "12", "-"]
    assert _row(table, "preemptions") == ["0", "-", "-"]


def test_assumptions_are_printed_once_below_the_table() -> None:
    """A reader who quotes a number has seen what was not measured."""
    table = render([run("a", 9.0), run("b", 9.0)])
    assert table.count("tool times: 5 ASSUMED") == 1
    assert "up to one KV block a turn" in table


def test_answers_unlike_the_recording_and_cut_jobs_are_said() -> None:
    """A server that ignores forced tokens, or jobs that did not fit, are not passed over."""
    result = run("other", 9.0)
    result.num_unlike_recording, result.num_cut_jobs = 7, 2
    table = render([result])
    assert "7 answers differ from the recording" in table
    assert "2 of 4 jobs were cut" in table


def test_results_on_disk_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``python -m eval.report A B`` prints what two runs of ``bench --json`` left."""
    for name in ("a", "b"):
        write_results(tmp_path / name / "result.json", ResultFile(runs=[run(name, 9.0)]))
    assert main([str(tmp_path / "a" / "result.json"), str(tmp_path / "b" / "result.json")]) == 0
    assert _row(capsys.readouterr().out, "job completion, mean s") == ["9.00", "9.00", "1.00x"]

"""Promises of ``make bench-step``: every case runs, and the crowded case is crowded."""

from __future__ import annotations

import sys

import pytest

from benchmarks.scheduler.step_bench import main


@pytest.mark.slow
def test_all_cases_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each case has a line per policy, with the ratio of the crowded step to the quiet one."""
    assert main(["--steps", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cases = [line for line in lines[1:-1] if float(line.split()[-3]) > 0]
    assert len(cases) == 2 * 4 + 5 + 2
    assert "10,000 waiting, 2,000 pins" in cases[-1]
    assert lines[-1].startswith("In the crowd a step takes ")


def test_bad_counts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Bad counts are refused with one sentence that names the flag and its limits."""
    with pytest.raises(SystemExit, match="2"):
        main(["--steps", "1"])
    assert "--steps must be in [10, 200]" in capsys.readouterr().err


def test_an_interpreter_without_vllm_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence says which interpreter lacks vllm, before anything is timed."""
    for python, complaint in (
        ("/no/such/python", "Cannot run /no/such/python: No such file or directory."),
        (sys.executable, "ModuleNotFoundError: No module named 'vllm'"),
    ):
        assert main(["--steps", "10", "--vllm", python]) == 1
        told = capsys.readouterr()
        assert complaint in told.err
        assert len(told.out.splitlines()) <= 1

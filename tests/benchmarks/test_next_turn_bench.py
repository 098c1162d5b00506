"""Promises of ``make bench-turn``: it times both ways to send a turn, part by part."""

from __future__ import annotations

import pytest

from benchmarks.http.next_turn import main


@pytest.mark.slow
def test_both_ways_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each policy has a table; an appended turn sends the core less than a whole one."""
    assert main(["--tokens", "4000", "--messages", "16", "--turns", "3"]) == 0
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert [table.split(",")[0] for table in tables] == ["fcfs", "continuum"]
    for table in tables:
        head, *lines = table.splitlines()
        assert head.split()[-2:] == ["whole", "appended"]
        assert len(lines) == 8
        whole, appended = (int(word.replace(",", "")) for word in lines[-1].split()[-2:])
        assert lines[-1].startswith("bytes sent to the core")
        assert appended < whole


def test_bad_counts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Bad counts are refused with one sentence that names the flags and their limits."""
    with pytest.raises(SystemExit, match="2"):
        main(["--tokens", "100"])
    assert "--tokens 100 for each message" in capsys.readouterr().err

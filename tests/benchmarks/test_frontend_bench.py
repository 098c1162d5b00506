"""Promises of ``make bench-front``: it times every part, and the first turn apart from later ones."""

from __future__ import annotations

import pytest

from benchmarks.http.frontend_bench import main


@pytest.mark.slow
def test_all_parts_are_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """Each part has a line with the first turn and later ones; prompts equal those of transformers."""
    assert main(["--tokens", "4000", "--messages", "10", "--turns", "4"]) == 0
    first, empty, head, *parts = capsys.readouterr().out.splitlines()
    assert first.startswith("10 messages, ")
    assert first.endswith(" tokens at turn 2 of 4, each of which adds 2 messages")
    assert (empty, head.split()) == ("", ["milliseconds", "first", "turn", "median", "min", "max"])
    times = [[float(word) for word in part.split()[-4:]] for part in parts]
    assert len(times) == 8
    assert all(low <= median <= high for _, median, low, high in times)
    assert parts[-2].startswith("all of it")


def test_bad_counts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Bad counts are refused with one sentence that names the flags and their limits."""
    with pytest.raises(SystemExit, match="2"):
        main(["--tokens", "100"])
    assert "--tokens at least 100 for each message" in capsys.readouterr().err

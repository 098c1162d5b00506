"""Promises of ``make bench-grammar``: it measures every case with and without a grammar."""

from __future__ import annotations

import pytest

from benchmarks.grammar.grammar_bench import VOCAB_SIZES, main


@pytest.mark.slow
def test_all_cases_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Each vocabulary has three lines; the others are compared with the one without grammars."""
    assert main(["--batch", "2", "--tokens", "4", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [int(line.split()[0]) for line in lines] == [size for size in VOCAB_SIZES for _ in range(3)]
    assert [line.endswith("1.00x") for line in lines[::3]] == [True] * len(VOCAB_SIZES)


def test_bad_counts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Bad counts are refused with one sentence that names the flag and its limits."""
    with pytest.raises(SystemExit, match="2"):
        main(["--batch", "1"])
    assert "--batch must be in [2, 64]" in capsys.readouterr().err

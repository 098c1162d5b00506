"""The promise of ``make bench``: it measures every figure for each way to the engine."""

from __future__ import annotations

import re

import pytest

from benchmarks.http.overhead import main


@pytest.mark.slow
def test_each_way_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Request rates at both concurrencies, token rates and latencies appear with and without HTTP."""
    assert main(["--rounds", "1", "--seconds", "0.2", "--front-ends", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rates = [line for line in lines if re.search(r"\d+ \(\d.* to \d.*\) +\d+\.\d\dx$", line)]
    assert [line.split("  ")[2] for line in rates] == ["AsyncLLM, no HTTP", "HTTP, 2 API servers"] * 3
    http = next(line for line in reversed(lines) if "HTTP, 2" in line)
    p50, p99, *added = map(float, http.split("servers")[1].split())
    assert 0 < p50 <= p99
    assert len(added) == 2


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Impossible settings are refused with one sentence that names the flags."""
    with pytest.raises(SystemExit, match="2"):
        main(["--rounds", "0"])
    assert "--rounds" in capsys.readouterr().err

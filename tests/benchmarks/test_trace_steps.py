"""The promise of ``make bench-trace``: engines with and without a trace do the same work, step by step."""

from __future__ import annotations

import re

import pytest

from benchmarks.tracing.trace_steps import main

pytestmark = pytest.mark.slow


def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Each engine but the first has three ratios with intervals; there are two verdicts; no event drops."""
    assert main(["--model", "nothing", "--rounds", "1", "--streams", "4", "--tokens", "10"]) == 0
    said = capsys.readouterr().out
    ratios = r"( +\d+\.\d{4} \(\d+\.\d{4} to \d+\.\d{4}\)){3}"
    for state in ("on", "on, compressed", "off again"):
        assert re.search(rf"^  {state} +[\d,]+ +\d+ {ratios}$", said, re.MULTILINE), said
    assert re.search(r"^  off +[\d,]+ +0$", said, re.MULTILINE), said
    assert re.findall(r"^  (on.*): throughput is \d+\.\d % ", said, re.MULTILINE) == ["on", "on, compressed"]
    assert said.endswith("  0 events dropped\n")

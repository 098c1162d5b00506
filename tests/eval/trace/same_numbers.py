"""Compares what several commands report about one trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from continuum.cli.main import main
from eval.trace.page.builder import read_page
from eval.trace.page.totals import KINDS


def check_same_numbers(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checks that the jobs' time shares, and every other figure common to ``summary``, ``jobs``, ``diff`` and
    ``report``, are equal."""

    def ask(*arguments: str) -> object:
        capsys.readouterr()
        assert main(["trace", *arguments, "--json"]) == 0
        answer: object = json.loads(capsys.readouterr().out)
        return answer

    summary, jobs, page = (
        ask("summary", str(trace)),
        ask("jobs", str(trace), "--limit", "100000"),
        read_page(trace),
    )
    assert isinstance(summary, dict)
    assert isinstance(jobs, list)
    figures = {figure.label: figure for figure in page.figures}
    seconds = {kind: summary["seconds"][f"{kind}_s"] for kind in KINDS}
    assert page.seconds == pytest.approx(list(seconds.values()), abs=1e-3)
    assert {kind: sum(job[f"{kind}_s"] for job in jobs) for kind in KINDS} == pytest.approx(seconds, abs=1e-6)
    whole_s, waited_s = sum(seconds.values()), sum(seconds[kind] for kind in ("queue", "memory", "preempted"))

    def percent(part: float, whole: float) -> str:
        return f"{100 * part / whole:.1f}" if whole else "–"

    pins, pool = summary["pins"], summary["pool"]
    assert figures["jobs"].value == f"{summary['num_jobs']:,}" == f"{len(jobs):,}"
    assert figures["jobs"].note == f"{sum(summary['turns_by_end'].values()):,} turns"
    assert figures["mean job time"].value == f"{summary['jct_s']['mean']:.2f}"
    assert figures["of the jobs' time, waiting"].value == percent(waited_s, whole_s)
    assert f"{summary['turns_waited_s']:,.2f} s" in figures["of the jobs' time, waiting"].note
    cached = percent(summary["cached_tokens"], summary["prompt_tokens"])
    assert figures["prompt tokens from cache"].value == cached
    held = sum(pins.values()) - pins.get("refused", 0)
    assert figures["pins handed over"].value == percent(pins.get("handed_over", 0), held)
    assert figures["pool in use"].value == percent(pool["running"] + pool["pinned"], 1)
    assert figures["preemptions"].value == f"{summary['num_preemptions']:,}"
    (same,) = [ask("diff", str(trace), str(trace))]
    assert isinstance(same, dict)
    assert same["a"] == same["b"] == summary

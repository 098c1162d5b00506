"""Promises about the data of a report's page; ``tests/browser`` checks how it looks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from continuum.cli.main import main
from eval.trace.page.job_book import MAX_JOBS
from eval.trace.page.page_data import PageData
from eval.trace.page.series import MAX_BUCKETS

NUM_JOBS = MAX_JOBS + 40
MANY_S = 30.0
"""The duration of a few jobs' tools, which makes those jobs the slowest."""


def simulate(folder: Path, jobs: list[dict[str, object]], *arguments: str) -> Path:
    """The trace of these jobs with the real scheduler and policy."""
    workload, trace = folder / "jobs.jsonl", folder / "trace.jsonl"
    workload.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    command = ["simulate", "--workload", str(workload), "--policies", "continuum", "--trace", str(trace)]
    assert main([*command, *arguments]) == 0
    return trace


def job(number: int, tool_s: float, num_turns: int = 2) -> dict[str, object]:
    turns: list[dict[str, object]] = []
    for turn in range(num_turns):
        prompt = 64 * (turn + 1)
        turns.append({"input_tokens": prompt, "prefix_tokens": 0, "output_tokens": 2, "gap_kind": "end"})
        if turn < num_turns - 1:
            turns[-1] |= {"gap_kind": "tool", "tool": "Bash", "tool_s": tool_s}
        if turn:
            turns[-1]["prefix_tokens"] = 64 * turn
    return {"job_id": f"job-{number:04}", "source": "hand-made", "group": f"g{number}", "turns": turns}


def write_page(trace: Path) -> tuple[PageData, str]:
    out = trace.with_suffix(".html")
    assert main(["trace", "report", str(trace), "--out", str(out)]) == 0
    html = out.read_text()
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return msgspec.json.decode(found[1], type=PageData), html


def figure(page: PageData, label: str) -> str:
    (value,) = [one.value for one in page.figures if one.label == label]
    return value


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More jobs than a page shows; every hundredth is slow."""
    jobs = [job(number, MANY_S if number % 100 == 7 else 0.05) for number in range(NUM_JOBS)]
    return simulate(tmp_path_factory.mktemp("crowded"), jobs, "--rate", "20", "--kv-tokens", "64000")


@pytest.mark.slow
def test_a_page_of_too_many_jobs_shows_the_slowest_and_a_sample_and_says_so(crowded: Path) -> None:
    """The page says so, and its figures and calls are those of all jobs."""
    page, html = write_page(crowded)
    shown = {one.job_id for one in page.jobs}
    assert len(page.jobs) <= MAX_JOBS
    assert {f"job-{number:04}" for number in range(7, NUM_JOBS, 100)} <= shown
    thirds = [
        sum(one.began_s * 3 // page.trace.duration_s == third for one in page.jobs) for third in range(2)
    ]
    assert min(thirds) > 50, "the others are from all of the trace"
    assert any(note.startswith(f"{len(page.jobs)} of {NUM_JOBS} jobs are drawn") for note in page.notes)
    assert any(note in html for note in page.notes)
    assert figure(page, "jobs") == str(NUM_JOBS)
    assert sum(tool.num_gaps for tool in page.tools) == NUM_JOBS
    assert all(len(one.turns) == one.num_turns == 2 for one in page.jobs)


@pytest.mark.slow
def test_two_readings_tell_of_a_job_what_one_tells(crowded: Path, tmp_path: Path) -> None:
    """What is shown of a job does not depend on the number of other jobs."""
    page, _ = write_page(crowded)
    lines = crowded.read_text().splitlines(keepends=True)
    few = tmp_path / "few.jsonl"
    first = next(index for index, line in enumerate(lines) if '"job-0300"' in line)
    few.write_text("".join(lines[:first]))
    early = {one.job_id: one for one in page.jobs if one.ended_s < 5}
    alone = {one.job_id: one for one in write_page(few)[0].jobs}
    assert early
    for job_id, one in early.items():
        assert [(turn.arrived_s, turn.spans) for turn in alone[job_id].turns] == [
            (turn.arrived_s, turn.spans) for turn in one.turns
        ]


@pytest.mark.slow
def test_the_pool_is_told_by_kind_in_a_bounded_number_of_buckets(crowded: Path) -> None:
    """At every moment the kinds add up to the pool."""
    page, _ = write_page(crowded)
    series, pool = page.series, page.trace.num_blocks
    assert MAX_BUCKETS // 4 < len(series.t) <= MAX_BUCKETS
    kinds = zip(series.running, series.pinned, series.cached, series.free, strict=True)
    assert all(sum(blocks) == pytest.approx(pool, abs=0.05) for blocks in kinds)
    assert series.free[0] > series.free[-1]
    assert max(series.cached) > 0


def test_an_engine_that_waits_for_a_tool_is_not_drawn_as_busy(tmp_path: Path) -> None:
    """Between a step's result and the next step nothing runs; the KV is pinned, then only cached."""
    page, _ = write_page(simulate(tmp_path, [job(0, 60.0)], "--kv-tokens", "64000"))
    series = page.series
    waiting = [index for index, time_s in enumerate(series.t) if 1 < time_s < 55]
    assert len(waiting) > 100
    assert all(series.num_running[index] == 0 == series.running[index] for index in waiting)
    assert all(series.num_waiting[index] == 0 for index in waiting)


def test_what_is_wrong_with_a_trace_stands_on_its_page(crowded: Path, tmp_path: Path) -> None:
    """A truncated trace is shown up to the cut."""
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(crowded.read_bytes()[:200_000])
    page, html = write_page(cut)
    (warning,) = page.warnings
    assert "cut off" in warning
    assert warning in html
    assert page.jobs


def test_a_trace_of_nothing_has_a_page(crowded: Path, tmp_path: Path) -> None:
    """A trace with only a header has a page."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text(crowded.read_text().split("\n", 1)[0] + "\n")
    page, _ = write_page(empty)
    assert page.jobs == []
    assert "No request is in the trace." in page.notes


@pytest.mark.slow
def test_errors_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], crowded: Path) -> None:
    """A missing file, an invalid trace or an unwritable page gives one sentence."""
    assert main(["trace", "report", str(tmp_path / "none"), "--out", str(tmp_path / "x.html")]) == 1
    assert "none" in capsys.readouterr().err
    text = tmp_path / "text"
    text.write_text("hello\n")
    assert main(["trace", "report", str(text), "--out", str(tmp_path / "x.html")]) == 1
    assert "line 1: not the header of a trace" in capsys.readouterr().err
    assert main(["trace", "report", str(crowded), "--out", str(text / "x.html")]) == 1
    message = capsys.readouterr().err
    assert "Cannot write the report" in message
    assert message.count("\n") == 1

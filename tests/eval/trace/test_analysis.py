"""The analysis of a trace agrees with the run that wrote it, and every second is counted once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from continuum.cli.main import main
from engine.core.request import RequestStatus
from eval.trace.analysis.jobs import PinOutcome, TurnEnd
from eval.trace.analysis.life_reader import LifeReader
from eval.trace.analysis.lives import Lives, TraceFacts, read_lives
from eval.trace.analysis.phases import Phase, Span, seconds_of, tile
from eval.trace.analysis.tables import describe_tables
from eval.trace.page.builder import read_page
from tests.core.engine_room import CountingGrammar, EngineRoom
from tests.core.test_traced_scheduler import Seen
from tests.eval.trace.same_numbers import check_same_numbers
from tests.tracing.simulated import SimulatedTrace, simulate
from tracing.tracer import Tracer

RUNS = {
    "continuum": ("continuum",),
    "fcfs": ("fcfs",),
    "host": ("continuum", "--host-kv-tokens", "40000"),
    "fork": ("fork",),
}
TABLES_DOC = Path(__file__).resolve().parents[3] / "docs" / "trace-tables.md"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SimulatedTrace]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: simulate(folder / name, *arguments) for name, arguments in RUNS.items()}


def read(path: Path) -> tuple[TraceFacts, Lives]:
    lives = Lives()
    return read_lives(path, lives), lives


def ask(capsys: pytest.CaptureFixture[str], *arguments: str | Path, code: int = 0) -> str:
    """Returns the output of a sub-command, or its error if it fails."""
    capsys.readouterr()
    assert main(["trace", *map(str, arguments)]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


def ask_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Any:
    return json.loads(ask(capsys, *arguments, "--json"))


# ---- agreement with the run ----


@pytest.mark.parametrize("name", RUNS)
def test_summary_is_what_the_simulator_measured(
    runs: dict[str, SimulatedTrace], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """JCT and TTFT differ only by the overheads outside of the engine; counts are equal."""
    run, summary = runs[name].result, ask_json(capsys, "summary", runs[name].path)
    assert summary["file"]["complete"], summary["file"]["faults"]
    assert summary["num_jobs"] == run["num_completed_jobs"]
    assert summary["turns_by_end"] == {"ended": run["num_turns"]}
    for ours, theirs in (
        ("jct_s", "job_completion_s"),
        ("ttft_first_s", "first_ttft_s"),
        ("ttft_returning_s", "returning_ttft_s"),
    ):
        for statistic in ("mean", "p50", "p95", "p99", "max"):
            assert summary[ours][statistic] == pytest.approx(run[theirs][statistic], abs=0.01), statistic
        assert summary[ours]["count"] == run[theirs]["count"]
    for figure in ("prompt_tokens", "cached_tokens", "output_tokens", "num_preemptions"):
        assert summary[figure] == run[figure], figure
    assert summary["loaded_tokens"] == (run["host_tokens_loaded"] or 0)
    pool = summary["pool"]
    assert pool["running"] + pool["pinned"] + pool["cached"] + pool["free"] == pytest.approx(1)


@pytest.mark.slow
def test_pins_are_those_that_the_engine_counted(
    runs: dict[str, SimulatedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every pin has one outcome; the time held in vain is at most the engine's figure."""
    for name in ("continuum", "host"):
        run, study = runs[name].result, ask_json(capsys, "pins", runs[name].path)
        outcomes = {each["outcome"]: each for each in study["outcomes"]}
        counted = {outcome: each["count"] for outcome, each in outcomes.items() if outcome != "refused"}
        assert counted == run["pins_ended"]
        in_vain = sum(each["in_vain_block_s"] for each in study["tools"] if each["tools"] == "all")
        # The engine's count also has the parts broken off pins that were later taken over.
        assert 0 < in_vain * 16 <= run["held_in_vain_token_s"] * 1.001
        (every,) = [each for each in study["tools"] if each["tools"] == "all"]
        kinds = [each for each in study["tools"] if each["tools"] != "all"]
        for figure in ("count", "handed_over", "spared_s", "block_s", "in_vain", "too_early", "too_early_s"):
            assert sum(each[figure] for each in kinds) == pytest.approx(every[figure]), figure
    assert "bash/" in ask(capsys, "pins", runs["continuum"].path)


def test_a_policy_without_pins_has_none(
    runs: dict[str, SimulatedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is a sentence, not an empty table."""
    assert "has no pins" in ask(capsys, "pins", runs["fcfs"].path)


# ---- sums ----


@pytest.mark.parametrize("name", RUNS)
def test_every_second_of_a_job_is_given_to_one_phase(runs: dict[str, SimulatedTrace], name: str) -> None:
    """Spans meet without gaps or overlaps, and add up to the wall time, for turns and for jobs."""
    _, lives = read(runs[name].path)
    jobs = lives.jobs()
    assert len(jobs) == 14
    for job in jobs:
        for turn in job.turns:
            assert_tiled(list(turn.spans), turn.arrived_s, turn.ended_s)
            assert turn.seconds.total_s == pytest.approx(turn.duration_s, abs=1e-9)
            assert turn.seconds == seconds_of(turn.spans)
        assert_tiled(job.spans, job.began_s, job.ended_s)
        assert job.seconds.total_s == pytest.approx(job.wall_s, abs=1e-9)
        assert all(0 <= span.memory_s <= span.duration_s + 1e-9 for span in job.spans)


def assert_tiled(spans: list[Span], start_s: float, end_s: float) -> None:
    assert spans[0].start_s == start_s
    assert spans[-1].end_s == end_s
    assert all(before.end_s == after.start_s for before, after in pairwise(spans))


MOMENTS = st.floats(-5, 15, allow_nan=False)


@given(
    st.lists(st.tuples(st.sampled_from(Phase), MOMENTS, st.floats(0, 9), st.floats(0, 1)), max_size=12),
    MOMENTS,
    st.floats(0.01, 20),
)
def test_overlapping_spans_are_tiled(
    drawn: list[tuple[Phase, float, float, float]], start_s: float, length_s: float
) -> None:
    """For any overlap of turns each moment has one phase: the most advanced of those that cover it."""
    spans = [Span(phase, at, at + long, share * long) for phase, at, long, share in drawn]
    end_s = start_s + length_s
    tiles = tile(spans, start_s, end_s)
    assert_tiled(tiles, start_s, end_s)
    assert seconds_of(tiles).total_s == pytest.approx(length_s, abs=1e-9)
    order = list(Phase)
    for each in tiles:
        for moment in (each.start_s + each.duration_s * part for part in (0.25, 0.5, 0.75)):
            covering = [span.phase for span in spans if span.start_s < moment < span.end_s]
            edge = any(moment in (span.start_s, span.end_s) for span in spans)
            assert edge or each.phase is min(covering, key=order.index, default=Phase.CLIENT)


def test_a_wait_is_for_memory_where_memory_is_short(runs: dict[str, SimulatedTrace]) -> None:
    """Jobs wait for memory in a pool that is too small, and not in a larger one."""
    _, lives = read(runs["continuum"].path)
    assert sum(turn.seconds.memory_s for turn in lives.turns) > 10


def test_a_wait_for_a_grammar_is_none_for_memory_or_a_place() -> None:
    """A request that awaits its grammar is not in the queue."""
    tracer = Tracer()
    seen = Seen()
    room = EngineRoom(tracer=tracer, max_num_seqs=1)
    tracer.add(seen)
    structured = room.add("structured", [1] * 10, awaits_grammar=True)
    room.add("plain", [2] * 10, max_tokens=8)
    room.add("left", [3] * 10, awaits_grammar=True)
    for _ in range(4):
        room.step(0.5)
    room.scheduler.grammar_compiled(structured, CountingGrammar(2), room.clock.now())
    room.scheduler.finish_requests(["left"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    room.run()
    lives = Lives()
    reader = LifeReader(lives)
    for event in seen.events:
        reader.take(event)
    reader.close()
    waits = {turn.req_id: turn.seconds for turn in lives.turns}
    assert waits["structured"].grammar_s == waits["left"].grammar_s == pytest.approx(2.0)
    assert 0 < waits["structured"].waited_s < 0.1
    assert waits["plain"].grammar_s == waits["left"].waited_s == 0


def test_without_a_shortage_nobody_waits_for_memory(tmp_path: Path) -> None:
    """The same jobs wait for no memory in a pool that holds them all."""
    _, lives = read(simulate(tmp_path, "continuum", "--kv-tokens", "400000").path)
    assert sum(turn.seconds.memory_s for turn in lives.turns) == 0
    assert sum(turn.seconds.preempted_s for turn in lives.turns) == 0


# ---- jobs ----


@pytest.mark.slow
def test_jobs_sorted_limited_and_as_json(
    runs: dict[str, SimulatedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    """Sorted by size; the columns of seconds add up to the job's time; the table counts hidden rows."""
    path = runs["continuum"].path
    jobs = ask_json(capsys, "jobs", path, "--sort", "jct")
    assert len(jobs) == 14
    assert [job["wall_s"] for job in jobs] == sorted((job["wall_s"] for job in jobs), reverse=True)
    phases = ("queue", "memory", "load", "prefill", "decode", "preempted", "recompute", "tool", "client")
    for job in jobs:
        assert sum(job[f"{phase}_s"] for phase in phases) == pytest.approx(job["wall_s"], abs=1e-9)
    text = ask(capsys, "jobs", path, "--sort", "jct", "--limit", "3")
    assert text.splitlines()[2].startswith(jobs[0]["job_id"])
    assert text.splitlines()[-1] == "and 11 more"
    assert [job["job_id"] for job in ask_json(capsys, "jobs", path, "--limit", "2")] == [
        job["job_id"] for job in sorted(jobs, key=lambda job: job["began_s"])[:2]
    ]


# ---- explain ----


@pytest.mark.slow
def test_an_explanation_adds_up_as_it_is_written(
    runs: dict[str, SimulatedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    """The printed lines of the account, and those of a turn, add up to the printed total."""
    _, lives = read(runs["continuum"].path)
    for job in lives.jobs():
        text = ask(capsys, "explain", runs["continuum"].path, job.job_id)
        account = text.split("where its time went")[1].split("\n\n")[0]
        *parts, total = [
            milliseconds(found[1])
            for found in re.finditer(r"^(?:\w.*?)\s{2,}([\d,]+\.\d{3})", account, re.MULTILINE)
        ]
        assert sum(parts) == total == round(job.wall_s * 1000)
        turns = re.split(r"\n\n(?=\+[\d,.]+ s  Turn )", text)[1:]
        assert len(turns) == len(job.turns)
        for turn, told in zip(job.turns, turns, strict=True):
            head = re.search(r"after\s+([\d,.]+)\s+s\.", told)
            assert head is not None
            lines = re.findall(r"^ {3,}([\d,]+\.\d{3}) s  \S", told, re.MULTILINE)
            assert sum(map(milliseconds, lines)) == milliseconds(head[1]) == round(turn.duration_s * 1000)


def milliseconds(written: str) -> int:
    return round(float(written.replace(",", "")) * 1000)


@pytest.mark.slow
def test_an_explanation_says_why_each_pin_was_there_and_who_broke_it(
    runs: dict[str, SimulatedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each pin has its rule with inputs, deadline and end; the breaker is a request of the trace."""
    _, lives = read(runs["continuum"].path)
    owners = {turn.req_id: turn.job_id for turn in lives.turns}
    outcomes = {pin.outcome for pin in lives.pins}
    assert {PinOutcome.HANDED_OVER, PinOutcome.REVOKED, PinOutcome.EXPIRED, PinOutcome.REFUSED} <= outcomes
    named = 0
    for job in lives.jobs():
        text = " ".join(ask(capsys, "explain", runs["continuum"].path, job.job_id).split())
        for pin in job.pins:
            if pin.pin_id is None:
                assert "were not held: pin budget is used up" in text
                continue
            assert f"Pin {pin.pin_id} held its {pin.num_blocks:,} blocks" in text
            if pin.last_decision is not None:
                assert f"Rule {pin.rule}, given: " in text
                assert (pin.reason or "") in text
            if pin.revoked_by is not None:
                named += 1
                assert (
                    f"for {pin.revoked_by} of job {owners[pin.revoked_by]}" in text or "the same job" in text
                )
        for gap in job.gaps:
            assert gap.called is None or f"It called {gap.called or 'nothing'};" in text
    assert named > 0


def test_an_explanation_says_what_kept_a_job_from_beginning(
    runs: dict[str, SimulatedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    """An explanation has the likely need of the jobs that had begun, and the available memory."""
    _, lives = read(runs["continuum"].path)
    parked = [turn for turn in lives.turns if turn.parked is not None]
    assert parked
    for turn in parked:
        assert turn.parked is not None
        assert turn.number == 1
        text = " ".join(ask(capsys, "explain", runs["continuum"].path, str(turn.job_id)).split())
        assert f"were likely to need {turn.parked.needed_blocks:,} blocks" in text
        assert f"this one {turn.parked.own_blocks:,}; all may need {turn.parked.allowed_blocks:,}" in text
        assert turn.parked.own_blocks > 0


def test_a_job_that_is_not_there_is_named_with_near_ones(
    runs: dict[str, SimulatedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and one sentence; for a request's id it names the request's job."""
    path = runs["continuum"].path
    said = ask(capsys, "explain", path, "swe-bench-13", code=1)
    assert said.count("\n") == 1
    assert "no job swe-bench-13; near ones are" in said
    assert "swe-bench-0-13" in said
    assert "is a request of job swe-bench-0-2" in ask(capsys, "explain", path, "swe-bench-0-2/0", code=1)


def test_an_explanation_as_json_is_the_records(
    runs: dict[str, SimulatedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON has the job's turns, gaps, pins and spans."""
    _, lives = read(runs["continuum"].path)
    job = lives.jobs()[0]
    told = ask_json(capsys, "explain", runs["continuum"].path, job.job_id)
    assert told["wall_s"] == job.wall_s
    assert [turn["req_id"] for turn in told["job"]["turns"]] == [turn.req_id for turn in job.turns]
    assert sum(span["end_s"] - span["start_s"] for span in told["spans"]) == pytest.approx(job.wall_s)


# ---- diff ----


@pytest.mark.slow
def test_two_policies_side_by_side(
    runs: dict[str, SimulatedTrace], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each job's change is the difference of its times and the sum of its parts; the mean is of both runs."""
    fcfs, ours = runs["fcfs"], runs["continuum"]
    diff = ask_json(capsys, "diff", fcfs.path, ours.path)
    assert (len(diff["jobs"]), diff["only_a"], diff["only_b"], diff["open"]) == (14, [], [], [])
    for job in diff["jobs"]:
        assert job["change_s"] == pytest.approx(job["b_s"] - job["a_s"], abs=1e-9)
        assert sum(job["parts_s"].values()) == pytest.approx(job["change_s"], abs=1e-6)
    mean = sum(job["change_s"] for job in diff["jobs"]) / 14
    measured = ours.result["job_completion_s"]["mean"] - fcfs.result["job_completion_s"]["mean"]
    assert mean == pytest.approx(measured, abs=0.01)
    assert sum(diff["parts_s"].values()) == pytest.approx(mean, abs=1e-6)
    text = ask(capsys, "diff", fcfs.path, ours.path, "--limit", "2")
    assert "14 jobs in both" in text
    assert "fcfs" in text.splitlines()[0]
    assert "continuum" in text.splitlines()[0]


@pytest.mark.slow
def test_a_trace_beside_itself(runs: dict[str, SimulatedTrace], capsys: pytest.CaptureFixture[str]) -> None:
    """A trace compared with itself has no changes."""
    path = runs["continuum"].path
    diff = ask_json(capsys, "diff", path, path)
    assert {job["change_s"] for job in diff["jobs"]} == {0.0}
    assert "0 gained (0 %), 0 lost" in ask(capsys, "diff", path, path)


@pytest.mark.slow
def test_runs_of_the_load_generator_are_compared(
    runs: dict[str, SimulatedTrace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The load generator marks job ids per run; jobs are matched without the marks, and other ids are not."""
    path = runs["continuum"].path
    for name, mark in (("a", ".0a1b2c"), ("b", ".ffffff"), ("other", "-other")):
        marked = re.sub(rb'"job_id":"([^"]+)"', rb'"job_id":"\1' + mark.encode() + b'"', path.read_bytes())
        (tmp_path / name).write_bytes(marked)
    diff = ask_json(capsys, "diff", tmp_path / "a", tmp_path / "b")
    assert len(diff["jobs"]) == 14
    assert "No job is complete in both" in ask(capsys, "diff", path, tmp_path / "other")


# ---- incomplete traces ----


def test_a_trace_cut_off_is_read_as_far_as_it_goes(
    runs: dict[str, SimulatedTrace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output reports a cut in mid-line, jobs under way are open, and every sum still adds up."""
    whole = runs["continuum"].path.read_bytes()
    path = tmp_path / "cut.jsonl"
    path.write_bytes(whole[: whole.index(b"\n", len(whole) // 3) - 7])
    summary = ask_json(capsys, "summary", path)
    assert not summary["file"]["complete"]
    assert "cut off in line" in summary["file"]["faults"][0]
    assert 0 < summary["num_open_jobs"] < summary["num_jobs"]
    facts, lives = read(path)
    for job in lives.jobs():
        assert job.seconds.total_s == pytest.approx(job.wall_s, abs=1e-9)
        assert_tiled(job.spans, job.began_s, job.ended_s)
    open_turns = [turn for turn in lives.turns if turn.end is TurnEnd.OPEN]
    assert open_turns
    assert all(turn.ended_s == facts.ended_s for turn in open_turns)
    (job_id, *_) = [turn.job_id for turn in open_turns]
    assert "still under way" in " ".join(ask(capsys, "explain", path, str(job_id)).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("jobs", "CUT"),
        ("pins", "CUT"),
        ("explain", "CUT", "swe-bench-0-0"),
        ("diff", "WHOLE", "CUT"),
        ("export", "CUT", "--format", "mooncake", "--out", "OUT"),
        ("export", "CUT", "--format", "csv", "--out", "OUT.csv"),
    ],
    ids=" ".join,
)
def test_every_command_says_that_a_trace_was_cut_off(
    runs: dict[str, SimulatedTrace],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
) -> None:
    """The message is on stderr, in the summary's words; a complete trace has none."""
    whole = runs["continuum"].path
    content = whole.read_bytes()
    cut = tmp_path / "cut.jsonl"
    cut.write_bytes(content[: content.index(b"\n", len(content) // 3) - 7])
    (fault,) = ask_json(capsys, "summary", cut)["file"]["faults"]
    paths = {"CUT": cut, "WHOLE": whole, "OUT": tmp_path / "out", "OUT.csv": tmp_path / "out.csv"}
    assert main(["trace", *(str(paths.get(word, word)) for word in command)]) == 0
    assert f"{cut} is NOT COMPLETE: {fault}\n" in capsys.readouterr().err
    paths["CUT"] = whole
    assert main(["trace", *(str(paths.get(word, word)) for word in command)]) == 0
    assert "NOT COMPLETE" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["continuum", "fcfs"])
def test_a_job_between_two_turns_where_a_trace_was_cut_is_open(
    runs: dict[str, SimulatedTrace], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For any cut, jobs compared with the whole trace are complete, so they are equal."""
    whole = runs[name].path
    lines = whole.read_bytes().splitlines(keepends=True)
    calling: set[str] = set()
    num_compared = 0
    for share in (0.2, 0.35, 0.5, 0.65, 0.8, 0.95):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(b"".join(lines[: int(share * len(lines))]))
        diff = ask_json(capsys, "diff", path, whole)
        assert {job["change_s"] for job in diff["jobs"]} <= {0.0}
        num_compared += len(diff["jobs"])
        jobs = {job.job_id: job for job in read(path)[1].jobs()}
        calling |= {job_id for job_id in diff["open"] if not jobs[job_id].is_open}
        if name == "continuum":  # It reports calls.
            assert ask_json(capsys, "summary", path)["num_open_jobs"] == len(diff["open"])
            assert sum(job.is_open for job in read_page(path).jobs) == len(diff["open"])
    assert num_compared > 5
    assert calling


def test_an_explanation_of_a_job_cut_off_between_two_turns(
    runs: dict[str, SimulatedTrace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job is explained up to the cut, and the end says why."""
    lines = runs["continuum"].path.read_bytes().splitlines(keepends=True)
    end = next(at for at, line in enumerate(lines) if b'"tools_started"' in line and b'"tools":["' in line)
    job_id = json.loads(lines[end])["job_id"]
    path = tmp_path / "cut.jsonl"
    path.write_bytes(b"".join(lines[: end + 1]))
    said = " ".join(ask(capsys, "explain", path, job_id).split())
    assert "so far" in said
    assert said.endswith("The trace was cut off while these calls ran.")


def test_a_trace_that_begins_late_makes_nothing_up(
    runs: dict[str, SimulatedTrace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a trace switched on late, jobs begin where they are first seen, and are marked so."""
    header, *lines = runs["continuum"].path.read_bytes().splitlines(keepends=True)
    path = tmp_path / "late.jsonl"
    late = header.replace(b'"from_start":true', b'"from_start":false')
    path.write_bytes(b"".join([late, *lines[len(lines) // 3 :]]))
    assert "it begins after the engine started" in ask(capsys, "summary", path)
    facts, lives = read(path)
    assert any(not turn.arrival_told for turn in lives.turns)
    for job in lives.jobs():
        assert job.began_s >= facts.began_s or job.turns[0].arrival_told
        assert_tiled(job.spans, job.began_s, job.ended_s)
        assert job.seconds.total_s == pytest.approx(job.wall_s, abs=1e-9)


def test_events_that_were_dropped(runs: dict[str, SimulatedTrace], tmp_path: Path) -> None:
    """A turn whose end was dropped is lost, not endless, and the summary counts missing events."""
    header, *lines = runs["continuum"].path.read_bytes().splitlines(keepends=True)
    gap = b'{"type":"gap","dropped":600}\n'
    path = tmp_path / "gap.jsonl"
    path.write_bytes(b"".join([header, *lines[:3000], gap, *lines[3600:]]))
    facts, lives = read(path)
    assert facts.num_lost == 600
    assert any(turn.end is TurnEnd.LOST for turn in lives.turns)
    assert not any(turn.end is TurnEnd.OPEN and turn.started_s is not None for turn in lives.turns)


@pytest.mark.slow
def test_a_compressed_trace_in_parts_is_the_same(
    runs: dict[str, SimulatedTrace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output does not depend on the files that a trace consists of."""
    compressed = simulate(tmp_path, "continuum", name="trace.jsonl.zst")
    assert compressed.path.read_bytes()[:4] == b"\x28\xb5\x2f\xfd"
    assert ask_json(capsys, "jobs", compressed.path) == ask_json(capsys, "jobs", runs["continuum"].path)


@pytest.mark.parametrize(
    "command", [("summary",), ("jobs",), ("pins",), ("explain", "job"), ("diff", "FILE")]
)
def test_what_is_no_trace_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    """A foreign or missing file gives exit code 1."""
    path = tmp_path / "other.jsonl"
    path.write_text('{"some": "file"}\n')
    name, *rest = [str(path) if word == "FILE" else word for word in command]
    for given_path in (path, tmp_path / "missing.jsonl"):
        said = ask(capsys, name, given_path, *rest, code=1)
        assert said.count("\n") == 1
        assert given_path.name in said


@pytest.mark.slow
def test_without_polars_it_says_what_to_install(runs: dict[str, SimulatedTrace]) -> None:
    """Commands that need no tables still work."""
    path = runs["continuum"].path
    program = (
        "import sys; sys.modules['polars'] = None; from continuum.cli.main import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program, "trace"]
    refused = subprocess.run([*command, "summary", str(path)], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "pip install 'continuum-engine[trace]'" in refused.stderr
    assert "Traceback" not in refused.stderr
    told = subprocess.run(
        [*command, "explain", str(path), "swe-bench-0-0"], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_same_numbers_whoever_is_asked(
    runs: dict[str, SimulatedTrace], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The numbers agree with and without pins, with a host tier and with preemptions."""
    check_same_numbers(runs[name].path, capsys)


def test_the_document_of_the_tables_is_theirs() -> None:
    """``docs/trace-tables.md`` is generated from the tables."""
    assert TABLES_DOC.read_text() == describe_tables()

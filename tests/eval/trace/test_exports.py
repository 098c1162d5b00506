"""Exports of a trace to other programs' formats match what happened."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from continuum.cli.main import main
from eval.trace.analysis.lives import Lives, read_lives
from eval.trace.analysis.tables import TABLES
from eval.workloads.mooncake import BLOCK_SIZE, read_mooncake
from eval.workloads.scheduler_trace import read_scheduler_trace
from tests.tracing.simulated import POOL_TOKENS, SimulatedTrace, simulate

REQUIRED_BY_DYNAMO = {"request_id", "output_tokens", "request_received_ms", "replay"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> SimulatedTrace:
    return simulate(tmp_path_factory.mktemp("trace"), "continuum")


@pytest.fixture(scope="module")
def lives(trace: SimulatedTrace) -> Lives:
    lives = Lives()
    read_lives(trace.path, lives)
    return lives


def export(trace: SimulatedTrace, form: str, out: Path) -> Path:
    assert main(["trace", "export", str(trace.path), "--format", form, "--out", str(out)]) == 0
    return out


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- Perfetto and Chrome ----


@pytest.fixture(scope="module")
def events(trace: SimulatedTrace, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = export(trace, "perfetto", tmp_path_factory.mktemp("perfetto") / "trace.json")
    found: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return found


def test_slices_nest_in_every_thread(events: list[dict[str, Any]]) -> None:
    """As the format requires, two slices of a thread are either disjoint or nested."""
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event.get("dur", 0) >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event.get("dur", 0)))
    assert len(threads) > 14
    for slices in threads.values():
        open_ends: list[float] = []
        for start, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)


def test_every_job_is_a_process_with_its_turns_calls_and_pins(
    events: list[dict[str, Any]], lives: Lives
) -> None:
    """Each is named, and each slice lasts as long as what it shows."""
    names = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert set(names.values()) == {"engine", *(f"job {job.job_id}" for job in lives.jobs())}
    by_kind = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_kind[event["cat"]].append(event)
    assert len(by_kind["turn"]) == len(lives.turns)
    assert len(by_kind["phase"]) == sum(len(turn.spans) for turn in lives.turns)
    assert len(by_kind["pin"]) == sum(pin.pin_id is not None for pin in lives.pins)
    assert len(by_kind["tool"]) == sum(bool(gap.tools) and gap.ended_s is not None for gap in lives.gaps)
    seconds = sum(event["dur"] for event in by_kind["turn"]) / 1e6
    assert seconds == pytest.approx(sum(turn.duration_s for turn in lives.turns), abs=1e-3)
    shown = {event["args"]["request"]: event for event in by_kind["turn"]}
    for turn in lives.turns:
        assert names[shown[turn.req_id]["pid"]] == f"job {turn.job_id}"
        assert shown[turn.req_id]["args"]["cached_tokens"] == turn.cached_tokens


def test_the_counters_are_the_whole_pool(events: list[dict[str, Any]]) -> None:
    """Running, pinned, cached and free blocks always add up to the pool."""
    pools = [event["args"] for event in events if event["name"] == "KV blocks"]
    assert len(pools) > 100
    assert {sum(pool.values()) for pool in pools} == {POOL_TOKENS // 16}
    assert all(set(pool) == {"running", "pinned", "cached", "free"} for pool in pools)


# ---- Mooncake ----


@pytest.fixture(scope="module")
def long_prompts(tmp_path_factory: pytest.TempPathFactory) -> SimulatedTrace:
    """A trace whose prompts all fill blocks of 512 tokens."""
    flags = ("--workload", "swe-bench:turns=0.4", "--kv-tokens", "100000")
    return simulate(tmp_path_factory.mktemp("long"), "continuum", *flags)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", ["short", "long"])
def test_mooncake_rows_come_back_as_the_same_jobs(
    trace: SimulatedTrace, long_prompts: SimulatedTrace, tmp_path: Path, prompts: str
) -> None:
    """Our own reader returns the turns, tokens, gaps and arrivals of the scheduler's trace."""
    run = trace if prompts == "short" else long_prompts
    out = export(run, "mooncake", tmp_path / "rows.jsonl")
    jobs, notes = read_mooncake(out)
    assert notes == []
    recorded = {job.job_id: job for job in read_scheduler_trace(run.path)[0]}
    assert {job.job_id for job in jobs} == set(recorded)
    for job in jobs:
        original = recorded[job.job_id]
        assert [turn.input_tokens for turn in job.turns] == [turn.input_tokens for turn in original.turns]
        assert [turn.output_tokens for turn in job.turns] == [turn.output_tokens for turn in original.turns]
        assert job.arrival_s == pytest.approx((original.arrival_s or 0.0) + 0.002, abs=0.0011)
        for turn, as_recorded in zip(job.turns, original.turns, strict=True):
            assert turn.gap_s == pytest.approx(as_recorded.gap_s, abs=1e-3)
        for before, turn in pairwise(job.turns if prompts == "long" else ()):
            assert turn.prefix_tokens == before.input_tokens // BLOCK_SIZE * BLOCK_SIZE
    timestamps = [row["timestamp"] for row in rows_of(out)]
    assert timestamps == sorted(timestamps)


def test_mooncake_rows_share_what_the_prompts_shared(long_prompts: SimulatedTrace, tmp_path: Path) -> None:
    """Each row of a session begins with the previous one's blocks; other jobs' blocks have other ids."""
    sessions = defaultdict(list)
    for row in rows_of(export(long_prompts, "mooncake", tmp_path / "rows.jsonl")):
        sessions[row["session_id"]].append(row)
    assert len(sessions) == 14
    num_shared = 0
    for rows in sessions.values():
        for before, after in pairwise(rows):
            full = before.get("hash_ids", [])[: before["input_length"] // BLOCK_SIZE]
            num_shared += len(full)
            assert full
            assert after["hash_ids"][: len(full)] == full
            assert "delay" in after
    assert num_shared > 50
    first = [set(rows[0].get("hash_ids", [])) for rows in sessions.values()]
    assert not set.intersection(*first)


def test_the_simulator_replays_mooncake_rows(
    trace: SimulatedTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An export is an ordinary workload."""
    out = export(trace, "mooncake", tmp_path / "rows.jsonl")
    result = tmp_path / "result.json"
    command = ["simulate", "--workload", str(out), "--policies", "fcfs", "--kv-tokens", "40000"]
    assert main([*command, "--arrivals", "recorded", "--json", str(result)]) == 0
    (run,) = json.loads(result.read_text())["runs"]
    assert run["num_turns"] == trace.result["num_turns"]
    assert run["output_tokens"] == trace.result["output_tokens"]


# ---- Dynamo ----


def test_dynamo_rows_have_what_its_loader_demands(
    trace: SimulatedTrace, lives: Lives, tmp_path: Path
) -> None:
    """There is a request_end per turn, with a unique id, session, times, and one hash per begun block."""
    rows = rows_of(export(trace, "dynamo", tmp_path / "rows.jsonl"))
    ends = [row for row in rows if row["event_type"] == "request_end"]
    assert {row["schema"] for row in rows} == {"dynamo.request.trace.v1"}
    assert len({row["request"]["request_id"] for row in ends}) == len(ends) == len(lives.turns)
    turns = {turn.req_id: turn for turn in lives.turns}
    for row in ends:
        request, turn = row["request"], turns[row["request"]["request_id"]]
        assert set(request) >= REQUIRED_BY_DYNAMO
        assert row["agent_context"]["session_id"] == turn.job_id
        replay = request["replay"]
        assert replay["input_length"] == request["input_tokens"] == turn.num_prompt_tokens
        size = replay["trace_block_size"]
        assert len(replay["input_sequence_hashes"]) == -(-replay["input_length"] // size)
        assert all(0 <= value < 2**64 for value in replay["input_sequence_hashes"])
        assert (request["output_tokens"], request.get("cached_tokens", 0)) == (
            turn.num_output_tokens,
            turn.cached_tokens,
        )
        began_ms = row["event_time_unix_ms"] - request["total_time_ms"]
        assert began_ms == pytest.approx(request["request_received_ms"], abs=1.1)
        assert request["ttft_ms"] == pytest.approx(1000 * (turn.ttft_s or 0), abs=1e-3)
    received = [row["request"]["request_received_ms"] for row in ends]
    assert received == sorted(received)


def test_dynamo_hashes_are_of_the_prefix(trace: SimulatedTrace, lives: Lives, tmp_path: Path) -> None:
    """A turn's hashes begin with the full blocks that its prompt shares with the previous turn."""
    rows = rows_of(export(trace, "dynamo", tmp_path / "rows.jsonl"))
    hashes = {
        row["request"]["request_id"]: row["request"]["replay"]["input_sequence_hashes"]
        for row in rows
        if row["event_type"] == "request_end"
    }
    turns = {turn.req_id: turn for turn in lives.turns}
    checked = 0
    for gap in lives.gaps:
        if gap.next_req_id is None:
            continue
        before, after = turns[gap.req_id], turns[gap.next_req_id]
        num_full = min(before.num_prompt_tokens, after.num_known_tokens) // 16
        assert hashes[before.req_id][:num_full] == hashes[after.req_id][:num_full]
        checked += num_full
    assert checked > 1000


def test_dynamo_tool_rows_are_the_gaps(trace: SimulatedTrace, lives: Lives, tmp_path: Path) -> None:
    """There is one row per call between two turns, with its duration."""
    rows = rows_of(export(trace, "dynamo", tmp_path / "rows.jsonl"))
    tools = [row["tool"] for row in rows if row["event_type"] == "tool_end"]
    gaps = [gap for gap in lives.gaps if gap.tools and gap.duration_s is not None]
    assert sorted(tool["duration_ms"] for tool in tools) == pytest.approx(
        sorted(1000 * (gap.duration_s or 0) for gap in gaps), abs=1e-2
    )
    assert {tool["tool_class"] for tool in tools} == {key for gap in gaps for key in gap.tools or ()}


# ---- tables ----


@pytest.mark.slow
def test_tables_have_their_documented_columns(trace: SimulatedTrace, lives: Lives, tmp_path: Path) -> None:
    """CSV and Parquet have a file per table, with the same rows."""
    folders = {form: export(trace, form, tmp_path / form) for form in ("csv", "parquet")}
    for name, (_, columns) in TABLES.items():
        parquet = pl.read_parquet(folders["parquet"] / f"{name}.parquet")
        assert parquet.schema == {column.name: column.dtype for column in columns}
        csv = pl.read_csv(folders["csv"] / f"{name}.csv", schema=parquet.schema)
        assert csv.height == parquet.height > 0
        assert csv.columns == parquet.columns
    turns = pl.read_parquet(folders["parquet"] / "turns.parquet")
    assert turns["req_id"].to_list() == [turn.req_id for turn in lives.turns]
    assert turns["memory_s"].sum() == pytest.approx(sum(turn.seconds.memory_s for turn in lives.turns))
    spans = pl.read_parquet(folders["parquet"] / "spans.parquet")
    assert spans.filter(pl.col("phase") == "decode").select(
        (pl.col("end_s") - pl.col("start_s")).sum()
    ).item() == pytest.approx(turns["decode_s"].sum())


def test_a_file_instead_of_a_folder_has_the_turns(
    trace: SimulatedTrace, lives: Lives, tmp_path: Path
) -> None:
    """If the output is a file, it is the table of turns."""
    out = export(trace, "parquet", tmp_path / "turns.parquet")
    assert pl.read_parquet(out).height == len(lives.turns)


def test_what_cannot_be_exported_is_one_sentence(
    trace: SimulatedTrace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid trace creates no file; a missing folder is named; a name of another format is refused."""
    other, out = tmp_path / "other.jsonl", tmp_path / "out.json"
    other.write_text("{}\n")
    assert main(["trace", "export", str(other), "--format", "perfetto", "--out", str(out)]) == 1
    assert not out.exists()
    for form, place, told in (
        ("perfetto", other / "out.json", f"{other} is not a folder"),
        ("parquet", other / "out.parquet", f"{other} is not a folder"),
        ("csv", other, "it is a file, and they need a folder"),
        ("csv", tmp_path / "t.parquet", "names a file of --format parquet, but --format is csv"),
        ("parquet", tmp_path / "t.csv", "names a file of --format csv, but --format is parquet"),
    ):
        capsys.readouterr()
        assert main(["trace", "export", str(trace.path), "--format", form, "--out", str(place)]) == 1
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("continuum: ")
        assert told in said
    assert [path.name for path in tmp_path.iterdir()] == ["other.jsonl"]


@pytest.mark.parametrize("form", ["perfetto", "mooncake", "dynamo", "csv", "parquet"])
def test_the_folder_of_an_export_is_made(trace: SimulatedTrace, tmp_path: Path, form: str) -> None:
    """The folder is created, as for reports and results."""
    assert export(trace, form, tmp_path / "new" / "deep" / f"turns.{form}").is_file()

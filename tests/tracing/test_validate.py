"""``continuum trace validate``: engines' traces keep every rule, and a broken rule is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from continuum.cli.main import main
from engine.frontend.llm import LLM
from engine.records.sampling_params import SamplingParams
from tracing.events import (
    JobEvent,
    PinEvent,
    PrefixCacheEvent,
    RequestArrived,
    SignalEvent,
    StepDecision,
    StepOutput,
    StepSnapshot,
    TraceEnd,
    TraceEvent,
    TraceGap,
    TraceHeader,
)
from tracing.parts import find_parts
from tracing.reader import read_trace
from tracing.validate import validate

PRESSED = (
    *("--workload", "swe-bench", "--jobs", "12", "--max-turns", "3"),
    *("--rate", "3", "--kv-tokens", "38000"),
)


def simulate(path: Path, policy: str, *flags: str) -> Path:
    assert main(["simulate", *PRESSED, "--policies", policy, "--trace", str(path), *flags]) == 0
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of a policy that pins, in a pool too small for all pins."""
    return simulate(tmp_path_factory.mktemp("validate") / "trace.jsonl", "continuum")


@pytest.fixture(scope="module")
def events(trace: Path) -> list[TraceEvent]:
    return list(read_trace(trace))


@pytest.mark.parametrize(
    ("policy", "flags"),
    [
        ("continuum", ("--host-kv-tokens", "200000")),
        ("infercept", ("--host-kv-tokens", "60000")),
        ("fcfs", ()),
    ],
)
def test_what_is_written_keeps_every_rule(tmp_path: Path, policy: str, flags: tuple[str, ...]) -> None:
    """Traces of other policies and of two tiers keep every rule."""
    path = simulate(tmp_path / "trace.jsonl.zst", policy, *flags)
    assert main(["trace", "validate", str(path)]) == 0


@pytest.mark.slow
def test_equal_replies_side_by_side(model: Path, tmp_path: Path) -> None:
    """Requests with equal replies compute them in separate blocks, each of which is counted."""
    path = tmp_path / "trace.jsonl"
    prompt = "One and the same, " * 20
    with LLM(str(model), trace_path=str(path), num_gpu_blocks_override=300) as llm:
        llm.generate([prompt, prompt], SamplingParams(temperature=0, max_tokens=64), use_tqdm=False)
        llm.generate(["Another"], SamplingParams(max_tokens=4), use_tqdm=False)
    assert main(["trace", "validate", str(path)]) == 0


def test_the_report(trace: Path, events: list[TraceEvent], capsys: pytest.CaptureFixture[str]) -> None:
    """The report counts the records of each type, and says that all is well."""
    assert main(["trace", "validate", str(trace)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == f"{trace}: {len(events):,} records in 1 file"
    assert f"{sum(isinstance(event, StepDecision) for event in events):,}\n" in said
    assert said.endswith("Every rule is kept.\n")
    assert any(isinstance(event, PinEvent) and event.cause == "revoked" for event in events)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the first record that fits, and the fault that it causes."""

    kind: type[Any]
    fits: Callable[[Any], bool]
    change: dict[str, Any] | Callable[[Any], dict[str, Any]]
    said: str


def always(event: object) -> bool:
    return True


def ends_a_pin(event: PinEvent) -> bool:
    return event.kind == "ended"


CHANGES = {
    "time": Change(StepDecision, lambda e: e.step == 9, {"now": 0.0}, "now is 0.0, but the record before it"),
    "numbers": Change(StepSnapshot, lambda e: e.step == 9, {"step": 12}, "step is 12, but 9 is next"),
    "decision": Change(StepDecision, lambda e: e.step == 9, {"step": 8}, "the snapshot before it of step 9"),
    "budget": Change(StepSnapshot, lambda e: e.running, {"token_budget": 0}, "but token_budget is 0"),
    "sum": Change(StepDecision, lambda e: e.tokens, {"total_tokens": 0}, "but tokens add up to"),
    "names": Change(StepDecision, lambda e: e.running, {"running": []}, "does not name the same requests"),
    "ran": Change(
        StepDecision, lambda e: e.running, {"preempted": ["x"]}, "preempted names x, which did not run"
    ),
    "both": Change(
        StepDecision, lambda e: e.running, lambda e: {"preempted": e.running}, "scheduled at once"
    ),
    "drafts": Change(
        StepDecision,
        lambda e: e.tokens,
        lambda e: {"drafts": e.tokens},
        "are drafts, of",
    ),
    "result": Change(StepOutput, always, {"step": 99}, "the last one that was decided is 0"),
    "free": Change(StepSnapshot, always, lambda e: {"free_blocks": e.total_blocks + 1}, "free_blocks is"),
    "pool": Change(StepSnapshot, always, {"total_blocks": 5}, "total_blocks is 5, but the header says"),
    "host": Change(StepSnapshot, always, {"host_blocks": 10**6}, "host_blocks is 1000000, but there are"),
    "disk": Change(StepSnapshot, always, {"disk_blocks": 10**6}, "disk_blocks is 1000000, but there are"),
    "lost": Change(
        StepSnapshot, always, lambda e: {"free_blocks": e.free_blocks - 1}, "1 blocks are not free"
    ),
    "cached": Change(
        StepSnapshot, lambda e: e.running, {"cached_blocks": 10**6}, "does not fit 1000000 cached"
    ),
    "hit": Change(PrefixCacheEvent, always, lambda e: {"hit_tokens": e.num_tokens}, "one is always computed"),
    "loaded": Change(PrefixCacheEvent, always, {"loaded_tokens": 10**6}, "loaded_tokens is 1000000"),
    "pins": Change(StepSnapshot, lambda e: e.num_pins, {"num_pins": 999}, "999 pins hold"),
    "shrunk": Change(PinEvent, lambda e: e.kind == "shrunk", {"num_blocks": 10**6}, "has none left"),
    "ended": Change(PinEvent, ends_a_pin, {"num_blocks": 10**6}, "ends with 1000000 blocks, but had"),
    "cause": Change(PinEvent, ends_a_pin, {"cause": "lost"}, "cause is 'lost'"),
    "twice": Change(PinEvent, ends_a_pin, {"pin_id": 999}, "pin 999 was not created, or has ended before"),
    "kind": Change(PinEvent, always, {"kind": "made"}, "kind is 'made'"),
    "job kind": Change(JobEvent, always, {"kind": "frob"}, "kind is 'frob', which is none of turn_arrived"),
    "result ended": Change(
        StepOutput, lambda e: e.ended, {"ended": {"x": "no"}}, "ended is 'no', which is none of"
    ),
    "signal": Change(SignalEvent, always, {"kind": "said"}, "kind is 'said', which is none of tool_gap"),
    "block size": Change(TraceHeader, always, {"block_size": 0}, "block_size is 0, but must be at least 1"),
    "no pool": Change(TraceHeader, always, {"num_blocks": 0}, "num_blocks is 0, but must be at least 1"),
    "taken over": Change(
        PinEvent,
        ends_a_pin,
        {"cause": "handed_over", "job_id": "nobody"},
        "is handed over, but no turn of job nobody is open",
    ),
    "turn": Change(
        JobEvent, lambda e: e.kind == "turn_ended", {"req_id": "x"}, "turn_ended: turn x did not arrive"
    ),
    "request": Change(RequestArrived, always, {"req_id": "x"}, "did not come in, or has ended before"),
    "seats": Change(TraceHeader, always, {"max_num_seqs": 1}, "requests run, but max_num_seqs is 1"),
    "count": Change(TraceEnd, always, {"written": 7}, "written is 7, but"),
}


def line_of(event: TraceEvent) -> bytes:
    return msgspec.json.encode(event) + b"\n"


def write(path: Path, events: list[TraceEvent]) -> Path:
    path.write_bytes(b"".join(map(line_of, events)))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_rule_that_is_broken(
    trace: Path, events: list[TraceEvent], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """One wrong record is found, its line named, and the exit code is 1."""
    change = CHANGES[name]
    at = next(i for i, event in enumerate(events) if isinstance(event, change.kind) and change.fits(event))
    fields = change.change(events[at]) if callable(change.change) else change.change
    lines = trace.read_bytes().splitlines(keepends=True)
    lines[at] = line_of(msgspec.structs.replace(events[at], **fields))
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"".join(lines))
    assert main(["trace", "validate", str(path)]) == 1
    said = capsys.readouterr().out
    assert change.said in said
    assert f"{path}, line " in said
    assert "NOT VALID: " in said


@pytest.mark.parametrize(
    "command",
    [
        ("validate",),
        ("summary",),
        ("report", "--out", "OUT"),
        ("replay",),
        ("replay", "--policy", "fcfs"),
        ("export", "--format", "mooncake", "--out", "OUT"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("block_size", -16, "0 to 1,048,576"),
        ("num_blocks", -5, "0 to 10,000,000"),
        ("num_blocks", 10**12, "0 to 10,000,000"),
        ("num_host_blocks", 10**12, "0 to 100,000,000"),
        ("wall_time_s", 1e300, "0 to 100,000,000,000"),
        ("part", 0, "1 to 2,147,483,647"),
    ],
)
def test_a_header_that_cannot_be(
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    name: str,
    value: float,
    limits: str,
) -> None:
    """Every command refuses the value, naming field and limits, before it writes anything."""
    path = with_header(trace, tmp_path, **{name: value})
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command[1:]]
    assert main(["trace", command[0], str(path), *words]) == 1
    assert (
        f"{path}, line 1: the header's {name} is {value:,}, but must be {limits}" in capsys.readouterr().err
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("windows", "chunks", "told"),
    [
        ([0, 0], [8], "the header's kv_group_chunks are 1, but must be 2"),
        ([0, 0], [0, -8], "the header's kv_group_chunks have -8, but must be 0 to 2,147,483,647"),
        ([0, 4], [0, 8], "a group in the header has both a window and chunks"),
    ],
)
def test_groups_that_cannot_be(
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    windows: list[int],
    chunks: list[int],
    told: str,
) -> None:
    path = with_header(trace, tmp_path, kv_group_windows=windows, kv_group_chunks=chunks)
    assert main(["trace", "validate", str(path)]) == 1
    assert told in capsys.readouterr().err


def with_header(trace: Path, folder: Path, **fields: float | list[int]) -> Path:
    header, _, rest = trace.read_bytes().partition(b"\n")
    path = folder / "edited.jsonl"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(header) | fields) + b"\n" + rest)
    return path


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("block_size", ("replay",)),
        ("num_blocks", ("replay",)),
        ("max_num_seqs", ("replay", "--policy", "fcfs")),
        ("block_size", ("export", "--format", "mooncake", "--out", "OUT")),
        ("block_size", ("export", "--format", "dynamo", "--out", "OUT")),
    ],
)
def test_a_header_that_does_not_say_what_is_needed(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, command: tuple[str, ...]
) -> None:
    """0 stands for a missing field: a command that needs it says so, and leaves no file behind."""
    path = with_header(trace, tmp_path, **{name: 0})
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command[1:]]
    assert main(["trace", command[0], str(path), *words]) == 1
    assert f"the header's {name} is 0, but must be at least 1, for" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def shuffled(lines: list[bytes]) -> list[bytes]:
    return random.Random(0).sample(lines, len(lines))


def one_early(lines: list[bytes]) -> list[bytes]:
    at = next(at for at, line in enumerate(lines) if at > 900 and b'"step_snapshot"' in line)
    early = msgspec.json.encode(msgspec.json.decode(lines[at]) | {"now": -1e9}) + b"\n"
    return [*lines[:at], early, *lines[at + 1 :]]


def result_too_early(lines: list[bytes]) -> list[bytes]:
    at = next(at for at, line in enumerate(lines) if at > 900 and b'"step_output"' in line)
    early = msgspec.json.encode(msgspec.json.decode(lines[at]) | {"now": -1e9}) + b"\n"
    return [*lines[:at], early, *lines[at + 1 :]]


def backwards(lines: list[bytes]) -> list[bytes]:
    return lines[::-1]


@pytest.mark.parametrize("damage", [shuffled, one_early, result_too_early, backwards])
@pytest.mark.parametrize("command", [("report", "--out", "OUT"), ("replay", "--policy", "fcfs")])
def test_times_that_run_backwards(
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[list[bytes]], list[bytes]],
    command: tuple[str, ...],
) -> None:
    """Commands compute nothing from such times; one sentence says that ``validate`` names the lines."""
    header, *lines = trace.read_bytes().splitlines(keepends=True)
    path = tmp_path / "damaged.jsonl"
    path.write_bytes(b"".join([header, *damage(lines)]))
    words = [str(tmp_path / "out") if word == "OUT" else word for word in command[1:]]
    assert main(["trace", command[0], str(path), *words]) == 1
    said = capsys.readouterr().err
    assert str(path) in said
    assert "continuum trace validate names the lines that are out of order" in said
    assert not (tmp_path / "out").exists()


def test_lines_that_are_none(trace: Path, tmp_path: Path) -> None:
    """A line that cannot be read is one fault; the rest is still checked."""
    lines = trace.read_bytes().splitlines(keepends=True)
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"".join([*lines, b'{"type":"closed"}\n', lines[-2]]))
    found = validate(path)
    assert [fault.place for fault in found.faults] == [f"{path}, line {len(lines) + n}" for n in (1, 2)]
    assert [fault.what for fault in found.faults][1] == "a record follows the end of the trace"


def test_many_faults_are_counted(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first 20 faults are shown, the others counted."""
    header, *rest = read_trace(trace)
    path = write(tmp_path / "bad.jsonl", [msgspec.structs.replace(header, num_blocks=3), *rest])
    assert main(["trace", "validate", str(path)]) == 1
    said = capsys.readouterr().out
    assert said.count("line ") == 20
    assert "more.\nNOT VALID: " in said


def test_a_trace_that_begins_midway(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown earlier events are no fault, after a late start or a gap; nor is a cut."""
    header, *events, end = read_trace(trace)
    assert isinstance(end, TraceEnd)
    middle = next(
        i for i, e in enumerate(events) if i > len(events) // 2 and isinstance(e, StepSnapshot) and e.num_pins
    )
    late = msgspec.structs.replace(header, from_start=False)
    written = len(events) - middle + 1
    path = write(tmp_path / "late.jsonl", [late, *events[middle:], TraceEnd(written=written, dropped=0)])
    assert main(["trace", "validate", str(path)]) == 0
    gap = [header, *events[:40], TraceGap(dropped=middle - 40), *events[middle:]]
    dropped = middle - 40
    path = write(tmp_path / "gap.jsonl", [*gap, TraceEnd(written=len(gap) - 1, dropped=dropped)])
    assert main(["trace", "validate", str(path)]) == 0
    said = capsys.readouterr().out
    assert f"{dropped:,} events are missing" in said
    assert "After each of its 1 gaps" in said
    path = tmp_path / "cut.jsonl"
    path.write_bytes(trace.read_bytes()[:-100_009])
    assert main(["trace", "validate", str(path)]) == 0
    assert "bytes are lost" in capsys.readouterr().out


def test_what_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file and a trace of an older version are refused with a sentence each."""
    assert main(["trace", "validate", str(tmp_path / "none.jsonl")]) == 1
    old = tmp_path / "old.jsonl"
    old.write_bytes(b'{"type":"header","schema_version":1,"wall_time_s":0.0,"monotonic_s":0.0}\n')
    assert main(["trace", "validate", str(old)]) == 1
    said = capsys.readouterr().err
    assert "none.jsonl: cannot be read: No such file or directory" in said
    assert "schema version 1, but this program reads versions 2 and 3" in said
    assert not find_parts(tmp_path / "none.jsonl")

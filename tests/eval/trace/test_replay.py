"""``continuum trace replay`` makes the same decisions under every policy, or reports what differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from continuum.cli.main import main
from tests.continuum.job_room import JobRoom
from tracing.events import (
    PinEvent,
    RequestArrived,
    SignalEvent,
    StepDecision,
    StepOutput,
    TraceEvent,
    TraceGap,
    TraceHeader,
)
from tracing.reader import read_trace
from tracing.tracer import Tracer
from tracing.writer import TraceWriter

pytestmark = pytest.mark.slow

SCARCE = ["--kv-tokens", "20000", "--max-num-batched-tokens", "512"]
WITH_HOST = [*SCARCE, "--host-kv-tokens", "60000"]


def simulated(path: Path, policy: str, *flags: str) -> Path:
    """The trace of about a hundred turns in a small pool."""
    jobs = ["--workload", "swe-bench:tokens=0.3", "--jobs", "9", "--rate", "1", "--max-turns", "8"]
    assert main(["simulate", *jobs, *(flags or SCARCE), "--policies", policy, "--trace", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trace of a rule that pins even with host memory."""
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    return simulated(path, "continuum:ttl_rule=fixed", *WITH_HOST)


def replayed(path: Path, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Returns the output of a replay, or its error."""
    capsys.readouterr()
    assert main(["trace", "replay", str(path)]) == code
    said = capsys.readouterr()
    return said.out or said.err


@pytest.mark.parametrize(
    "policy",
    [
        "continuum",
        "continuum:ttl_rule=price,max_ttl_s=inf",
        *("fcfs", "priority", "program-fcfs", "fixed-ttl:5", "fork", "plas", "gate:0.5", "without-order"),
        *("hrrn", "wspt", "gittins", "tlru:1000", "pause:0.5", "idleness"),
    ],
)
def test_any_servable_policy_decides_the_same_again(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every servable policy replays equally in a pool with preemptions."""
    path = simulated(tmp_path / "trace.jsonl", policy)
    steps = [event for event in read_trace(path) if isinstance(event, StepDecision)]
    said = replayed(path, capsys)
    assert said.startswith(f"{len(steps):,} steps, ")
    assert "no difference" in said
    assert len(steps) > 1000


def test_pins_and_copies_are_decided_the_same_again(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The trace has pins that were broken and handed over, loads, and preemptions."""
    events = list(read_trace(trace))
    causes = Counter(event.cause for event in events if isinstance(event, PinEvent))
    assert causes["revoked"] > 3
    assert causes["handed_over"] > 10
    assert sum(len(event.finished_loads) for event in events if isinstance(event, StepOutput)) > 3
    assert any(event.preempted for event in events if isinstance(event, StepDecision))
    num_pins = sum(isinstance(event, PinEvent) for event in events)
    assert f"{num_pins:,} pin events" in replayed(trace, capsys)


def test_where_copies_do_nothing_is_held_and_that_is_decided_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With host memory the default rule unpins each turn, and the trace says why."""
    path = simulated(tmp_path / "trace.jsonl", "continuum", *WITH_HOST)
    told = [event for event in read_trace(path) if isinstance(event, PinEvent)]
    assert {event.kind for event in told} == {"decided", "refused"}
    assert all("its copy is loaded back" in (event.reason or "") for event in told if event.kind == "refused")
    assert "no difference" in replayed(path, capsys)


def test_turns_that_nobody_named_are_recognized_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unnamed turns are recognized by tokens of partial blocks; the trace has only those that the policy
    read."""
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter.open(path)
    tracer = Tracer()
    room = JobRoom(tracer=tracer)
    writer.emit(room.begin_trace(from_start=True))
    tracer.add(writer)
    system = list(range(40))
    for agent in ("a", "b", "c"):
        room.turn(f"{agent}1", [*system, *[ord(agent)] * 10], num_replies=0)
        room.read(f"{agent}1", "pytest")
    receipts = [
        room.turn(f"{agent}2", [*room.said(f"{agent}1"), *range(500, 560)], num_replies=1) for agent in "cab"
    ]
    room.scheduler.close(room.clock.now())
    writer.close()
    assert len({receipt.job_id for receipt in receipts}) == 3
    assert {receipt.turn for receipt in receipts} == {2}
    arrived = [event for event in read_trace(path) if isinstance(event, RequestArrived)]
    assert {len(event.tokens) for event in arrived} == {1, 2}, (
        "the second turns were told apart by their middle"
    )
    assert max(len(run) for event in arrived for _, run in event.tokens) < 2 * 16 + 1
    assert "no difference" in replayed(path, capsys)


# ---- differences ----


def _of(which: type[Any], **given: Any) -> Callable[[TraceEvent], bool]:
    return lambda event: (
        isinstance(event, which) and all(getattr(event, name) == value for name, value in given.items())
    )


def _tampered(path: Path, to: Path, which: Callable[[TraceEvent], bool], **changed: Any) -> TraceEvent:
    """Writes a copy in which the tenth last such event is changed; returns the original event."""
    events = list(read_trace(path))
    place = [number for number, event in enumerate(events) if which(event)][-10:][0]
    was = events[place]
    events[place] = msgspec.structs.replace(was, **changed)
    _write(to, events)
    return was


def _write(path: Path, events: list[TraceEvent]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))


@pytest.mark.parametrize(
    ("which", "changed", "told"),
    [
        (
            _of(StepDecision),
            {"total_tokens": 1_000_000},
            ["step_decision", "total_tokens: recorded 1000000, now"],
        ),
        (_of(PinEvent, kind="decided"), {"ttl_s": 1234.5}, ["pin_event", "ttl_s: recorded 1234.5, now"]),
        (_of(PinEvent, kind="ended"), {"cause": "hidden"}, ['cause: recorded "hidden", now "']),
        (_of(SignalEvent), {"receipt": None}, ["signal", "receipt: recorded null, now {"]),
        (_of(RequestArrived), {"max_tokens": 1}, ["recorded: {", "now:"]),
        (_of(StepDecision), {"now": 9e9}, ["step_snapshot", "now"]),
    ],
)
def test_a_decision_that_was_not_made_is_found_and_named(
    trace: Path,
    tmp_path: Path,
    which: Callable[[TraceEvent], bool],
    changed: dict[str, Any],
    told: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The report names the step, its cause and the differing fields; exit code 1."""
    was = _tampered(trace, tmp_path / "trace.jsonl", which, **changed)
    said = replayed(tmp_path / "trace.jsonl", capsys, code=1)
    assert re.search(r"^step \d+ is not as it was: event \d+ of the trace, after \{", said, re.MULTILINE)
    if isinstance(was, StepDecision):
        assert f"step {was.step} is not as it was" in said
    assert all(words in said for words in told), said


def test_a_request_that_is_left_out_is_missed(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = list(read_trace(trace))
    place = [number for number, event in enumerate(events) if isinstance(event, RequestArrived)][20]
    _write(tmp_path / "trace.jsonl", events[:place] + events[place + 1 :])
    assert "is not as it was" in replayed(tmp_path / "trace.jsonl", capsys, code=1)


# ---- what cannot be replayed ----


def test_where_events_are_missing_it_stops_and_says_so(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The replay compares everything before the gap."""
    events = list(read_trace(trace))
    place = next(number for number, event in enumerate(events) if _of(StepDecision, step=200)(event))
    _write(tmp_path / "trace.jsonl", [*events[: place + 1], TraceGap(dropped=3), *events[place + 4 :]])
    said = replayed(tmp_path / "trace.jsonl", capsys, code=1)
    assert said.startswith("201 steps, ")
    assert "STOPPED there: 3 events are missing" in said


def test_a_trace_that_was_cut_off_is_replayed_up_to_there(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = trace.read_bytes()
    (tmp_path / "trace.jsonl").write_bytes(content[: len(content) // 2])
    said = replayed(tmp_path / "trace.jsonl", capsys)
    assert "no difference" in said
    assert "CUT OFF in line" in said


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"from_start": False}, "switched on while the engine ran"),
        ({"policy": "lifo"}, "a policy that this program does not have: 'lifo'"),
        ({"policy_options": {}}, "has other options than the header's: answer_ttl_s, cheap_reload_share"),
        ({"estimator_state": "{}"}, "estimator state in the header cannot be used"),
        ({"schema_version": 1}, "schema version 1, but this program reads versions 2 and 3"),
        ({"num_events_before": 7}, "first parts of the trace are gone"),
    ],
)
def test_what_cannot_be_replayed_is_one_sentence(
    trace: Path,
    tmp_path: Path,
    changed: dict[str, Any],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error has exit code 1 and no traceback."""
    _tampered(trace, tmp_path / "trace.jsonl", _of(TraceHeader), **changed)
    said = replayed(tmp_path / "trace.jsonl", capsys, code=1)
    assert complaint in said
    assert said.startswith("continuum: ")
    assert said.count("\n") == 1


def test_who_was_told_the_future_cannot_be_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = simulated(tmp_path / "trace.jsonl", "oracle")
    assert "oracle used what only its simulation knew" in replayed(path, capsys, code=1)

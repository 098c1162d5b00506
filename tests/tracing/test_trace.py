"""A trace: emitted events are read back, a bad disk loses events but no time, a cut file can be read."""

from __future__ import annotations

import builtins
import io
import os
import threading
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tracing.events import JobEvent, PinEvent, TraceEnd, TraceEvent, TraceGap, TraceHeader
from tracing.line_limits import MAX_COUNT, MAX_FLOAT
from tracing.reader import TraceError, TraceReport, read_trace
from tracing.writer import TraceWriter

HEADER = TraceHeader(wall_time_s=1.7e9, monotonic_s=3.25, policy="fcfs", num_blocks=8)

INTS = st.integers(-MAX_COUNT, MAX_COUNT)
FLOATS = st.floats(-MAX_FLOAT, MAX_FLOAT)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
OF_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    float: FLOATS,
    str: TEXTS,
    bytes: st.binary(max_size=16),
    bool: st.booleans(),
    type(None): st.none(),
}


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold."""
    if kind in OF_TYPE:
        return OF_TYPE[kind]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.deferred(lambda: events_of(kind))
    arguments = [of_type(each) for each in typing.get_args(kind)]
    match typing.get_origin(kind):
        case builtins.list:
            return st.lists(*arguments, max_size=3)
        case builtins.dict:
            return st.dictionaries(*arguments, max_size=3)
        case builtins.tuple:
            return st.tuples(*arguments)
    return st.one_of(arguments)


def events_of(kind: Any) -> st.SearchStrategy[Any]:
    names = {f.name: of_type(f.type) for f in msgspec.structs.fields(kind) if f.name != "schema_version"}
    return st.builds(kind, **names)


EVENTS = st.one_of([events_of(kind) for kind in typing.get_args(TraceEvent) if kind is not TraceEnd])


def job(number: int) -> JobEvent:
    return JobEvent(now=float(number), kind="turn_arrived", job_id=f"job-{number}")


def write(path: Path, events: list[TraceEvent]) -> None:
    writer = TraceWriter.open(str(path))
    for event in events:
        writer.emit(event)
    writer.close()


class BlockedFile(io.BytesIO):
    """A disk that hangs in its first write until ``unblock`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = threading.Event()
        self.unblock = threading.Event()
        self.content = b""

    def write(self, data: Any, /) -> int:
        self.hangs.set()
        self.unblock.wait()
        return super().write(data)

    def close(self) -> None:
        self.content = self.getvalue()
        super().close()


class FullFile(io.BytesIO):
    """A disk that takes the first write and then is full."""

    num_writes = 0

    def write(self, data: Any, /) -> int:
        self.num_writes += 1
        if self.num_writes > 1:
            raise OSError(28, "No space left on device")
        return super().write(data)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(events=st.lists(EVENTS, max_size=12))
def test_round_trip(tmp_path: Path, events: list[TraceEvent]) -> None:
    """Events are read back equal, in order, followed by a closing count."""
    path = tmp_path / "trace.jsonl"
    write(path, [HEADER, *events])
    report = TraceReport()
    num_gaps = sum(isinstance(event, TraceGap) for event in events)
    end = TraceEnd(written=len(events) + 1 - num_gaps, dropped=0)
    assert list(read_trace(path, report)) == [HEADER, *events, end]
    assert report == TraceReport(num_events=len(events) + 2, num_parts=1, end=end)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(events=st.lists(EVENTS, max_size=4), data=st.data())
def test_cut_anywhere(tmp_path: Path, events: list[TraceEvent], data: st.DataObject) -> None:
    """Cut at any byte after the header, a trace yields the events before the cut and names the cut line."""
    path = tmp_path / "trace.jsonl"
    write(path, [HEADER, *events])
    whole = path.read_bytes()
    keep = data.draw(st.integers(whole.index(b"\n") + 1, len(whole)))
    path.write_bytes(whole[:keep])
    report = TraceReport()
    read = list(read_trace(path, report))
    assert read[: len(events) + 1] == [HEADER, *events][: len(read)]
    num_lines = len(whole[:keep].splitlines())
    assert report.cut_line == (num_lines if len(read) < num_lines else None)
    assert len(read) >= num_lines - 1
    assert (report.end is not None) == (keep >= len(whole) - 1)


def test_hanging_disk_never_blocks_emit() -> None:
    """While a write hangs, emit returns at once; events beyond the capacity are counted exactly."""
    file = BlockedFile()
    writer = TraceWriter(file, capacity=10)
    writer.emit(HEADER)
    assert file.hangs.wait(10)
    for number in range(17):
        writer.emit(job(number))
    assert (writer.written, writer.dropped) == (0, 7)
    assert not writer.flush(timeout_s=0.01)
    file.unblock.set()
    assert writer.flush(timeout_s=10)
    assert (writer.written, writer.dropped) == (11, 7)
    writer.close()
    assert file.content.count(b"\n") == 12
    assert msgspec.json.decode(file.content.splitlines()[-1], type=TraceEnd) == TraceEnd(
        written=11, dropped=7
    )


def test_full_pipe_never_blocks_emit(tmp_path: Path) -> None:
    """A full FIFO stands for a stuck disk: every event is either written or counted."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    read_end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = TraceWriter.open(str(path), capacity=100)
    writer.emit(HEADER)
    for number in range(20_000):  # far more than the pipe, the current batch and the queue hold
        writer.emit(job(number))
    assert writer.dropped > 0
    os.set_blocking(read_end, True)
    lines = bytearray()
    closer = threading.Thread(target=writer.close)
    closer.start()
    while chunk := os.read(read_end, 1 << 16):
        lines += chunk
    closer.join()
    os.close(read_end)
    assert writer.written + writer.dropped == 20_001
    assert lines.count(b"\n") == writer.written + lines.count(b'"type":"gap"') + 1


def test_close_gives_up_on_a_dead_disk() -> None:
    """Closing does not wait for ever: events still pending then count as dropped."""
    file = BlockedFile()
    writer = TraceWriter(file)
    writer.emit(HEADER)
    assert file.hangs.wait(10)
    writer.emit(job(1))
    writer.emit(job(2))
    writer.close(timeout_s=0.01)
    assert writer.dropped == 2
    file.unblock.set()
    writer.close()
    assert (writer.written, writer.dropped) == (1, 2)


def test_disk_full() -> None:
    """A full disk ends the trace, not the engine: later events are counted and the cause is kept."""
    writer = TraceWriter(FullFile())
    writer.emit(HEADER)
    writer.flush()
    writer.emit(job(1))
    writer.flush()
    writer.emit(job(2))
    writer.close()
    assert (writer.written, writer.dropped) == (1, 2)
    assert isinstance(writer.error, OSError)


def test_bad_event_is_counted_alone(tmp_path: Path) -> None:
    """An event that cannot be encoded affects no other event."""
    path = tmp_path / "trace.jsonl"
    bad = PinEvent(now=0.0, kind="created", job_id="\ud800", req_id="r", num_blocks=1)
    write(path, [HEADER, bad, job(1)])
    assert list(read_trace(path)) == [HEADER, TraceGap(dropped=1), job(1), TraceEnd(written=2, dropped=1)]


def test_close_is_final(tmp_path: Path) -> None:
    """After close, emit only counts, and closing again changes nothing."""
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter.open(str(path))
    writer.emit(HEADER)
    writer.close()
    content = path.read_bytes()
    writer.emit(job(1))
    assert writer.flush()
    writer.close()
    assert (writer.written, writer.dropped) == (1, 1)
    assert path.read_bytes() == content


def test_unwritable_path(tmp_path: Path) -> None:
    """A path that cannot be written is an OSError at once, not a silent loss later."""
    with pytest.raises(OSError, match="missing"):
        TraceWriter.open(str(tmp_path / "missing" / "trace.jsonl"))


def test_bad_line_is_named(tmp_path: Path) -> None:
    """A broken line in the middle, an unknown type or a wrong field is an error that names the line."""
    path = tmp_path / "trace.jsonl"
    write(path, [HEADER, job(1), job(2)])
    lines = path.read_bytes().splitlines(keepends=True)
    for bad in (
        b'{"type":"job_event",\n',
        b'{"type":"other"}\n',
        b'{"type":"end","written":"1"}\n',
        b"\xff\n",
        b'{"type":"end","more":' + b"[" * 100_000 + b"\n",
    ):
        path.write_bytes(b"".join([lines[0], lines[1], bad, lines[3]]))
        with pytest.raises(TraceError, match="line 3"):
            list(read_trace(path))


@pytest.mark.parametrize(
    "content", [b"", b'{"type":"end","written":0,"dropped":0}\n', b"\x00\x01", b'{"type":"head']
)
def test_header_comes_first(tmp_path: Path, content: bytes) -> None:
    """A file that does not start with a trace header is refused, whatever it is."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match="line 1"):
        list(read_trace(path))


def test_other_schema_version(tmp_path: Path) -> None:
    """A trace of another schema version is refused, and both versions are named."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"type":"header","schema_version":999,"clock":"new field"}\n')
    with pytest.raises(TraceError, match="version 999, but this program reads versions 2 and 3"):
        list(read_trace(path))

"""A trace in several files, compressed or not, is read as one, by any part's name; a cut is reported."""

from __future__ import annotations

import os
import random
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from tracing.events import JobEvent, TraceEnd, TraceEvent, TraceGap, TraceHeader
from tracing.parts import find_parts
from tracing.reader import TraceError, TraceReport, read_trace
from tracing.writer import TraceWriter

HEADER = TraceHeader(wall_time_s=1.7e9, monotonic_s=3.25, from_start=True, policy="fcfs", num_blocks=8)
PART_BYTES = 2000


def jobs(count: int) -> list[JobEvent]:
    return [JobEvent(now=float(i), kind="turn_arrived", job_id=f"job-{i}", turn=i) for i in range(count)]


def write(path: Path, events: list[JobEvent], *, per_batch: int = 10, max_files: int | None = None) -> None:
    """Writes a trace in parts of about PART_BYTES; each batch is on disk before the next is emitted."""
    writer = TraceWriter.open(path, max_bytes=PART_BYTES, max_files=max_files)
    writer.emit(HEADER)
    for number, event in enumerate(events, start=1):
        writer.emit(event)
        if number % per_batch == 0:
            assert writer.flush(10)
    writer.close()
    assert writer.error is None


def write_whole(path: Path, events: list[JobEvent], *, per_batch: int = 1000) -> None:
    """Writes one file as if killed before its end: its last batch is flushed, nothing is closed."""
    writer = TraceWriter.open(path)
    writer.emit(HEADER)
    for number, event in enumerate(events):
        if number % per_batch == 0:
            assert writer.flush(10)
        writer.emit(event)
    assert writer.flush(10)
    content = path.read_bytes()
    writer.close()
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst", "trace", "a.b.jsonl"])
def test_parts_are_one_trace(tmp_path: Path, name: str) -> None:
    """Each part begins with the header and its number; read by any part's name they are one trace."""
    path = tmp_path / name
    events = jobs(1500)
    write(path, events)
    parts = find_parts(path)
    assert [number for number, _ in parts] == list(range(1, len(parts) + 1))
    assert len(parts) > 3
    end = TraceEnd(written=1501, dropped=0)
    for asked in (path, parts[-1][1], str(parts[1][1])):
        report = TraceReport()
        assert list(read_trace(asked, report)) == [HEADER, *events, end]
        assert (report.num_parts, report.num_events, report.end) == (len(parts), 1502, end)
    sizes = [part.stat().st_size for _, part in parts]
    assert all(PART_BYTES <= size < 2 * PART_BYTES for size in sizes[:-1])


def test_a_part_alone_says_which_it_is(tmp_path: Path) -> None:
    """A part that was moved away is still a trace: its header has its number and earlier events' count."""
    write(tmp_path / "trace.jsonl", jobs(200))
    (tmp_path / "moved").mkdir()
    alone = tmp_path / "moved" / "third.jsonl"
    os.rename(tmp_path / "trace.part0003.jsonl", alone)
    header, *events = read_trace(alone)
    assert isinstance(header, TraceHeader)
    assert (header.part, header.from_start, header.policy) == (3, False, "fcfs")
    assert events == jobs(200)[header.num_events_before - 1 :][: len(events)]
    with pytest.raises(TraceError, match=r"part 3 of the trace, which comes before it, is missing"):
        list(read_trace(tmp_path / "trace.jsonl"))


def test_only_the_last_files_are_kept(tmp_path: Path) -> None:
    """The last files of a rotated trace stay; reading begins at the first one and reports what is gone."""
    path = tmp_path / "trace.jsonl.zst"
    events = jobs(600)
    write(path, events, max_files=2)
    assert len(find_parts(path)) == 2
    assert not path.exists()
    report = TraceReport()
    header, *rest = read_trace(path, report)
    assert isinstance(header, TraceHeader)
    assert not header.from_start
    assert report.num_events_before == header.num_events_before > 0
    assert rest == [*events[header.num_events_before - 1 :], TraceEnd(written=601, dropped=0)]


def test_a_folder_with_one_trace(tmp_path: Path) -> None:
    """A folder is read as the one trace in it; with none or several, the error says what is there."""
    with pytest.raises(TraceError, match="no file of this folder is named like a trace"):
        list(read_trace(tmp_path))
    (tmp_path / "notes.txt").write_text("no trace")
    write(tmp_path / "trace.jsonl", jobs(200))
    assert list(read_trace(tmp_path))[1:-1] == jobs(200)
    write(tmp_path / "other.jsonl.zst", jobs(1))
    with pytest.raises(TraceError, match=r"2 traces \(other.jsonl.zst, trace.jsonl"):
        list(read_trace(tmp_path))


def test_a_new_trace_takes_the_parts_of_the_old_with_it(tmp_path: Path) -> None:
    """A new trace removes all parts of the one it replaces, and leaves other traces alone."""
    write(tmp_path / "trace.jsonl", jobs(400))
    write(tmp_path / "trace2.jsonl", jobs(200))
    others = len(find_parts(tmp_path / "trace2.jsonl"))
    write(tmp_path / "trace.jsonl", jobs(3))
    assert list(read_trace(tmp_path / "trace.jsonl"))[1:-1] == jobs(3)
    assert len(find_parts(tmp_path / "trace2.jsonl")) == others > 1


def test_a_trace_that_may_replace_nothing_takes_no_name_of_another(tmp_path: Path) -> None:
    """A new trace may not use a name of which parts exist, even without the first; parts are private."""
    write(tmp_path / "trace.jsonl", jobs(400))
    parts = find_parts(tmp_path / "trace.jsonl")
    assert {path.stat().st_mode & 0o777 for _, path in parts} == {0o600}
    (tmp_path / "trace.jsonl").unlink()
    before = {path: path.read_bytes() for _, path in parts[1:]}
    with pytest.raises(FileExistsError):
        TraceWriter.open(tmp_path / "trace.jsonl", max_bytes=1024, replace=False)
    assert {path: path.read_bytes() for path in before} == before
    (tmp_path / "fresh.part0002.jsonl.txt").write_text("no part of it")
    TraceWriter.open(tmp_path / "fresh.jsonl", replace=False).close()


def test_parts_of_different_traces_are_not_mixed(tmp_path: Path) -> None:
    """A part of another trace, put among these, is refused by its header."""
    write(tmp_path / "trace.jsonl", jobs(200))
    part = tmp_path / "trace.part0002.jsonl"
    part.write_bytes(part.read_bytes().replace(b'"monotonic_s":3.25', b'"monotonic_s":4.25', 1))
    with pytest.raises(TraceError, match=r"part0002.jsonl, line 1: not part 2 of the trace"):
        list(read_trace(tmp_path))


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst"])
def test_killed_at_any_byte(tmp_path: Path, name: str) -> None:
    """From a file cut anywhere, all flushed events are read; the cut line and lost bytes are reported."""
    path = tmp_path / name
    events = jobs(300)
    write_whole(path, events, per_batch=20)
    whole = path.read_bytes()
    expected: list[TraceEvent] = [HEADER, *events]
    assert list(read_trace(path)) == expected
    draw = random.Random(1)
    lengths = sorted({len(whole) - 1, *draw.sample(range(800, len(whole)), 60)})
    for length in lengths:
        path.write_bytes(whole[:length])
        report = TraceReport()
        read = list(read_trace(path, report))
        assert read == expected[: len(read)]
        assert report.end is None
        if report.cut_line is None:
            assert whole[:length].endswith(b"}\n") or whole[length : length + 1] == b"\n"
        else:
            assert report.cut_line == len(read) + 1
            assert 0 <= report.cut_bytes < 1000


def test_bytes_lost_of_a_compressed_trace(tmp_path: Path) -> None:
    """The reported lost bytes are those after the last complete flush."""
    path = tmp_path / "trace.jsonl.zst"
    writer = TraceWriter.open(path)
    writer.emit(HEADER)
    sizes = []
    for _ in range(5):
        for event in jobs(5000):
            writer.emit(event)
        assert writer.flush(10)
        sizes.append(path.stat().st_size)
    content = path.read_bytes()
    writer.close()
    for size, following in pairwise(sizes):
        path.write_bytes(content[: size + 3])
        report = TraceReport()
        num_read = sum(1 for _ in read_trace(path, report))
        assert (num_read % 5000, report.cut_line, report.cut_bytes) == (1, num_read + 1, 3)
        path.write_bytes(content[: following - 1])
        report = TraceReport()
        assert sum(1 for _ in read_trace(path, report)) >= num_read
        assert report.cut_bytes > 0


def test_the_last_part_cut_in_its_header(tmp_path: Path) -> None:
    """If the writer is killed while it begins a part, the parts before it are read."""
    write(tmp_path / "trace.jsonl", jobs(200))
    parts = find_parts(tmp_path / "trace.jsonl")
    parts[-1][1].write_bytes(b'{"type":"hea')
    report = TraceReport()
    assert sum(1 for _ in read_trace(tmp_path, report)) > 100
    assert (report.cut_line, report.cut_bytes) == (1, 12)
    parts[-2][1].write_bytes(parts[-2][1].read_bytes()[:-5])
    with pytest.raises(TraceError, match=rf"{parts[-2][1].name}, line \d+"):
        list(read_trace(tmp_path))


def test_damage_is_named(tmp_path: Path) -> None:
    """A compressed file with a wrong byte in its middle is refused; the error names the line reached."""
    path = tmp_path / "trace.jsonl.zst"
    write_whole(path, jobs(3000), per_batch=100)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"line \d+: "):
        list(read_trace(path))


def test_rotation_loses_nothing_under_load(tmp_path: Path) -> None:
    """With events at full speed and a new file every few milliseconds, each event is kept or counted."""
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter.open(path, max_bytes=20_000, capacity=2000)
    writer.emit(HEADER)
    for event in jobs(30_000):
        writer.emit(event)
    writer.close()
    assert writer.written + writer.dropped == 30_001
    events = list(read_trace(path))
    gaps = [event for event in events if isinstance(event, TraceGap)]
    assert len(events) == writer.written + len(gaps) + 1
    assert sum(gap.dropped for gap in gaps) <= writer.dropped
    turns = [event.turn for event in events if isinstance(event, JobEvent)]
    assert turns == sorted(turns)


@pytest.mark.slow
def test_reading_takes_bounded_memory(tmp_path: Path) -> None:
    """A trace of many megabytes is read in a few, compressed or not."""
    for name in ("trace.jsonl", "trace.jsonl.zst"):
        path = tmp_path / name
        writer = TraceWriter.open(path, capacity=1 << 20)
        writer.emit(HEADER)
        for event in jobs(60_000):
            writer.emit(event)
        writer.close()
        assert writer.written == 60_001
        tracemalloc.start()
        assert sum(1 for _ in read_trace(path)) == 60_002
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2 << 20
    assert (tmp_path / "trace.jsonl").stat().st_size > 4 << 20
    assert (tmp_path / "trace.jsonl.zst").stat().st_size < 1 << 20

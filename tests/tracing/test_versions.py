"""Traces of schema version 2 are read with the names of version 3."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from continuum.cli.main import main
from tracing.events import (
    SCHEMA_VERSION,
    JobEvent,
    PinEvent,
    SignalEvent,
    StepOutput,
    TraceEvent,
    TraceHeader,
)
from tracing.parts import PartReader
from tracing.reader import TraceReport, read_trace
from tracing.versions import upgrade_from

OF_VERSION_2 = Path(__file__).parent / "version_2.jsonl.zst"
OLD_HEADER = (
    b'{"type":"header","schema_version":2,"wall_time_s":1.0,"monotonic_s":0.0,"policy":"continuum",'
    b'"policy_options":{"little_share":0.01,"look_again_s":0.0001,"telling_jobs":20,"pool_share":0.9}}\n'
)
OLD_LINES = [
    b'{"type":"job_event","now":1.0,"kind":"told_progress","job_id":"j","told_remaining_s":3.0}\n',
    b'{"type":"job_event","now":1.0,"kind":"turn_parked","job_id":"j","needed_blocks":9,"room_blocks":8}\n',
    (
        b'{"type":"pin_event","now":1.0,"kind":"ended","job_id":"j","req_id":"r","num_blocks":1,'
        b'"cause":"broken"}\n'
    ),
    (
        b'{"type":"step_output","step":0,"now":1.0,"receipts":[{"job_id":"j","turn":2,"previous_pin":"broken",'
        b'"req_id":"r"}]}\n'
    ),
    (
        b'{"type":"signal","now":1.0,"kind":"tool_gap_started","req_id":"r","calls":[{"name":"broken",'
        b'"arguments":"{\\"cause\\":\\"broken\\",\\"room_blocks\\":1}"}]}\n'
    ),
]


def _read(path: Path) -> list[TraceEvent]:
    return list(read_trace(path))


def test_all_names_of_version_2_are_renamed(tmp_path: Path) -> None:
    """Clients' texts stay unchanged, even where they look like a field."""
    path = tmp_path / "old.jsonl"
    path.write_bytes(OLD_HEADER + b"".join(OLD_LINES))
    header, hint, parked, pin, output, signal = _read(path)
    assert isinstance(header, TraceHeader)
    assert header.schema_version == SCHEMA_VERSION
    assert set(header.policy_options) == {
        "small_job_share", "search_backoff_s", "min_ended_jobs", "pool_share",
    }  # fmt: skip
    assert isinstance(hint, JobEvent)
    assert (hint.kind, hint.reported_remaining_s) == ("reported_progress", 3.0)
    assert isinstance(parked, JobEvent)
    assert (parked.needed_blocks, parked.allowed_blocks) == (9, 8)
    assert isinstance(pin, PinEvent)
    assert pin.cause == "revoked"
    assert isinstance(output, StepOutput)
    assert output.receipts[0].previous_pin == "revoked"
    assert isinstance(signal, SignalEvent)
    assert (signal.calls[0].name, signal.calls[0].arguments) == (
        "broken",
        '{"cause":"broken","room_blocks":1}',
    )


def test_later_parts_are_renamed_too(tmp_path: Path) -> None:
    """Each part repeats the header, with its version."""
    (tmp_path / "old.jsonl").write_bytes(OLD_HEADER + OLD_LINES[0])
    again = OLD_HEADER.replace(b"}}", b'},"part":2,"num_events_before":2}')
    (tmp_path / "old.part0002.jsonl").write_bytes(again + OLD_LINES[2])
    *_, pin = _read(tmp_path / "old.jsonl")
    assert isinstance(pin, PinEvent)
    assert pin.cause == "revoked"


def test_a_cut_line_counts_as_in_the_file(tmp_path: Path) -> None:
    """Lost bytes are counted in the file, not in the renamed line."""
    path = tmp_path / "old.jsonl"
    cut = OLD_LINES[1][:-3]
    path.write_bytes(OLD_HEADER + cut)
    report = TraceReport()
    assert len(list(read_trace(path, report))) == 1
    assert report.cut_bytes == len(cut)


def test_a_line_of_today_is_left_alone() -> None:
    """Traces of the current version are not converted."""
    assert upgrade_from(SCHEMA_VERSION) is None


def test_a_kept_trace_of_version_2_keeps_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    """A stored trace's header has version 2, and ``validate`` finds nothing."""
    reader = PartReader(OF_VERSION_2)
    header = msgspec.json.decode(reader.readline(1 << 20))
    reader.close()
    assert header["schema_version"] == 2
    assert main(["trace", "validate", str(OF_VERSION_2)]) == 0
    assert "Every rule is kept." in capsys.readouterr().out

"""Our scheduler decides step for step as recorded from an independent V1 scheduler."""

from __future__ import annotations

import gzip
from pathlib import Path

import msgspec
import pytest

from tests.conformance import golden

RECORDED = Path(__file__).parents[3] / "shared" / "golden" / "scheduler.jsonl.gz"


@pytest.fixture
def recorded() -> Path:
    if not RECORDED.exists():
        pytest.skip("the recorded decisions (../shared/golden) are not here")
    return RECORDED


def test_every_recorded_step_agrees(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All 60 cases agree: order, tokens, prefix hits, preemptions, free blocks and finishes of every step."""
    assert golden.main([str(recorded)]) == 0
    assert capsys.readouterr().out == "16393 of 16393 steps agree\n"


def test_a_wrong_recording_is_noticed(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one free block more in one recorded step, the replay names the step that differs."""
    with gzip.open(recorded, "rb") as lines:
        case = msgspec.json.decode(next(lines), type=golden.GoldenCase)
    case.steps[50].free_blocks += 1
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(msgspec.json.encode(case))
    assert golden.main([str(changed)]) == 1
    printed = capsys.readouterr().out
    assert "case 1, step 50: free_blocks" in printed
    assert f"50 of {len(case.steps)} steps agree" in printed

"""On recorded jobs, compacted or rewound histories are freed and hardly ever requested again."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.workloads.catalog import load_jobs
from tests.continuum.superseded_recorded import superseded_in

pytestmark = pytest.mark.slow

RECORDED = Path(__file__).resolve().parents[3] / "shared" / "workloads" / "kv-cache-tester.jsonl"


@pytest.mark.shared
@pytest.mark.skipif(not RECORDED.exists(), reason="the recorded jobs are not here")
def test_what_recorded_jobs_go_on_without_they_do_not_ask_for_again() -> None:
    """More than a twentieth of the blocks is released; less than a twentieth of these is requested again."""
    found = superseded_in(load_jobs(str(RECORDED), 20, 0))
    assert found.num_dead_blocks > found.num_blocks / 20
    assert found.num_asked_again < found.num_dead_blocks / 20

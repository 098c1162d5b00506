"""On recorded jobs: histories that were compacted or rewound are freed, and hardly ever asked for
again."""

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
    """At least a twentieth of the computed tokens is released; of that less than a twentieth comes
    back."""
    found = superseded_in(load_jobs(str(RECORDED), 20, 0))
    assert found.num_dead_blocks > found.num_blocks / 20
    assert found.num_asked_again < found.num_dead_blocks / 20

"""Suites of the HTTP API, run again on a server of two cores: clients see no difference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.conftest import SERVER_FLAGS

SUITES = ("test_jobs_endpoints", "test_jobs", "test_identity", "test_responses", "test_chat", "test_messages")
REPOSITORY = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(600)]


def test_suites_of_jobs_signals_and_responses_pass() -> None:
    """All these tests run on a server of two cores, except those that start their own server."""
    files = [str(REPOSITORY / "tests" / "api" / f"{name}.py") for name in SUITES]
    told = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not slow", *files],
        capture_output=True,
        text=True,
        check=False,
        cwd=REPOSITORY,
        env={**os.environ, SERVER_FLAGS: "--data-parallel-size 2"},
    )
    assert told.returncode == 0, told.stdout[-4000:]

"""A server prints its capacity while it starts, and its addresses when it is ready."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("front_ends", ["1", "2"])
def test_it_says_what_fits_and_where_its_page_is(model: Path, front_ends: str) -> None:
    """Both lines precede the one that signals readiness to other programs."""
    flags = ["--host", "127.0.0.1", "--port", "0", "--num-gpu-blocks-override", "300"]
    flags += ["--served-model-name", "tiny", "--api-server-count", front_ends]
    flags += ["--speculative-config", '{"method": "suffix", "weigh_costs": false}']
    process = subprocess.Popen(
        [sys.executable, "-m", "continuum.cli", "serve", str(model), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert process.stdout is not None
    try:
        said: list[str] = []
        while not said or not said[-1].startswith("Serving "):
            said.append(process.stdout.readline())
            assert said[-1], f"it ended before it was ready: {said}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    loaded, pool, drafts, page, serving = said[-5:]
    assert re.fullmatch(r"Loaded in [\d.]+ s: weights [\d.]+ s, memory [\d.]+ s, warm-up [\d.]+ s\n", loaded)
    assert pool.startswith("KV pool: 4,800 tokens in 300 blocks of 16: ")
    assert " jobs of " in pool
    assert drafts == "Drafts: up to 810 MiB of memory per engine core, for the texts of earlier turns\n"
    url = serving.split()[-1]
    assert page == f"Dashboard: {url}/dashboard\n"

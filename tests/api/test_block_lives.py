"""Promises about the metrics of KV blocks, checked on a real server."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.api.server import running_server

NAMES = ("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds", "kv_block_reuse_gap_seconds")


def counts(url: str) -> dict[str, float]:
    """Returns how many lifetimes, idle times and reuse gaps the server has counted."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return {
        name: float(line.rpartition(" ")[2])
        for name in NAMES
        for line in lines
        if line.startswith(f"vllm:{name}_count")
    }


@pytest.mark.slow
def test_evicted_blocks_are_told(model: Path) -> None:
    """In a pool that three prompts fill, evicted blocks are counted: the first prompt is reused twice
    before."""
    flags = ("--num-gpu-blocks-override", "66", "--kv-cache-metrics", "--kv-cache-metrics-sample", "1")
    with running_server(model, *flags) as server:
        for first in (1, 1, 1, 2, 3, 4):
            body = {"prompt": [first] * 400, "max_tokens": 1}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        found = counts(server.url)
        assert found[NAMES[0]] == found[NAMES[1]] >= 20
        assert found[NAMES[2]] >= 20


def test_without_the_flag_there_are_none(http: httpx.Client) -> None:
    assert "kv_block_lifetime" not in http.get("/metrics").text

"""What a gateway concludes from our gauges: a server full of pins has room, one full of work has not."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.server import running_server
from tests.api.test_jobs_endpoints import call

MOST_WAITING = 5
MOST_USED = 0.8
"""The defaults of llm-d's router 0.10, ``saturationdetector/utilization``."""
NUM_BLOCKS = 120


@pytest.fixture(scope="module")
def http(model: Path) -> Iterator[httpx.Client]:
    flags = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-num-seqs", "2")
    with (
        running_server(model, *flags) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client


def gauges(http: httpx.Client) -> dict[str, float]:
    """The server's gauges, by a foreign reader."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {family.name: family.samples[0].value for family in families if family.type == "gauge"}


def saturation(read: dict[str, float]) -> float:
    """llm-d's formula; at 1 its flow control holds requests back."""
    waiting = read["vllm:num_requests_waiting"] / MOST_WAITING
    return max(waiting, read["vllm:kv_cache_usage_perc"] / MOST_USED)


def test_pins_are_room_and_work_is_not(http: httpx.Client) -> None:
    """Paused jobs hold most blocks, and their turns are let through; then work waits, and is not."""
    for number in range(4):
        call(http, f"{number} is a job of many words " * 16, job_id=f"paused-{number}")
    idle = gauges(http)
    assert idle["continuum:pins"] >= 2
    assert idle["continuum:pinned_share"] > 0.5
    assert saturation(idle) == 0
    body = {"model": http.get("/v1/models").json()["data"][0]["id"], "ignore_eos": True, "max_tokens": 600}
    with ThreadPoolExecutor(10) as threads:
        answers = [
            threads.submit(http.post, "/v1/completions", json={**body, "prompt": f"{number} counts"})
            for number in range(10)
        ]
        while not any(answer.done() for answer in answers) and saturation(gauges(http)) < 1:
            pass
        busy = gauges(http)
        assert busy["vllm:num_requests_running"] == 2
        assert saturation(busy) >= 1
        assert all(answer.result().is_success for answer in answers)
    assert saturation(gauges(http)) == 0

"""Promises to tenants that share a server with a greedy one: their KV is pinned too, and they are
answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.server import running_server

pytestmark = pytest.mark.slow

Body = dict[str, Any]
BLOCK = 16
JOB_BLOCKS = 5
BUDGET = 56
"""Blocks that may be pinned: nine tenths of 63."""
GREEDY, ANN, SHARED = "sk-greedy", "sk-ann", "sk-shared"
MAX_WAIT_S = 2
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    """A server that runs one request at a time and keeps pins for long."""
    flags = [
        *("--num-gpu-blocks-override", "64", "--max-model-len", "256", "--max-num-seqs", "1"),
        *("--ttl-rule", "fixed", "--fixed-ttl-s", "600", "--max-silent-wait-s", str(MAX_WAIT_S)),
        *("--api-key", f"greedy:{GREEDY}", f"ann:{ANN}", SHARED, "--no-dashboard"),
    ]
    with running_server(model, *flags) as running:
        yield running.url
        assert running.interrupt() == 0


def client_of(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"x-api-key": key}, timeout=DEADLINE_S)


def turn(http: httpx.Client, job_id: str | None, prompt: list[int], **request: Any) -> Body:
    """Runs a turn; returns its receipt, empty for a request without a job."""
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, **request}
    response = http.post("/v1/completions", json=body if job_id is None else {**body, "job_id": job_id})
    assert response.status_code == 200, response.text
    receipt: Body = response.json()["usage"].get("receipt", {})
    return receipt


def prompt_of(number: int) -> list[int]:
    return [20 + number] * (JOB_BLOCKS * BLOCK)


def pinned_blocks(http: httpx.Client, job_id: str) -> int:
    job = http.get(f"/v1/jobs/{job_id}").json()
    return sum(tip["pinned_blocks"] for tip in job["branches"])


def test_one_tenant_cannot_keep_anothers_jobs_unheld(url: str) -> None:
    """A tenant alone may fill the whole pin budget. Another tenant, named by an API key or by ``user``, then
    still gets pins, and the first one's next jobs cannot take them."""
    with client_of(url, GREEDY) as greedy, client_of(url, ANN) as ann, client_of(url, SHARED) as shared:
        receipts = [turn(greedy, f"greedy{number}", prompt_of(number)) for number in range(13)]
        held = [receipt["pinned_tokens"] // BLOCK for receipt in receipts]
        assert sum(held) == BUDGET // JOB_BLOCKS * JOB_BLOCKS
        assert receipts[-1]["reason"] == "pin budget is used up"
        assert turn(ann, "ann", prompt_of(20))["pinned_tokens"] == JOB_BLOCKS * BLOCK
        assert turn(shared, "bob", prompt_of(21), user="bob")["pinned_tokens"] == JOB_BLOCKS * BLOCK
        for number in range(30, 34):
            assert turn(greedy, f"greedy{number}", prompt_of(number))["pinned_tokens"] == 0
        assert pinned_blocks(ann, "ann") == pinned_blocks(shared, "bob") == JOB_BLOCKS
        for http, job_id, number in ((ann, "ann", 20), (shared, "bob", 21)):
            user = {"user": "bob"} if job_id == "bob" else {}
            back = turn(http, job_id, [*prompt_of(number), 9, 9], **user)
            assert (back["previous_pin"], back["cached_tokens"]) == ("handed_over", JOB_BLOCKS * BLOCK)


class Agent(threading.Thread):
    """Requests its job's next turn as soon as the last one is answered, until it is stopped."""

    def __init__(self, url: str, number: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._number = number
        self.num_turns = 0
        self.stopped = threading.Event()

    def run(self) -> None:
        with client_of(self._url, SHARED) as http:
            while not self.stopped.is_set():
                job, place = divmod(self.num_turns, 20)
                prompt = [100 + self._number] * (3 * BLOCK + 4 * place)
                turn(http, f"agent{self._number}-{job}", prompt, max_tokens=16)
                self.num_turns += 1


def test_a_question_beside_agents_that_never_rest_is_answered(url: str) -> None:
    """With one slot and agents whose pinned turns always wait for it, a request without a job is still
    answered after it has waited for ``--max-silent-wait-s``, as it is not streamed."""
    agents = [Agent(url, number) for number in range(3)]
    for agent in agents:
        agent.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not all(agent.num_turns > 2 for agent in agents):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with client_of(url, SHARED) as http:
            turn(http, None, [9] * 40)
    finally:
        for agent in agents:
            agent.stopped.set()
        for agent in agents:
            agent.join(DEADLINE_S)
    assert all(agent.num_turns > 3 for agent in agents)

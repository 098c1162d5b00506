"""Clients that stream, disconnect, retry and return, all at once: nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from continuum.cli.main import main
from engine.worker.loading.tiny_models import make_model_folder
from eval.load.server_process import ServerProcess
from tracing.events import RequestsEnded, SignalEvent, StepDecision
from tracing.reader import read_trace

pytestmark = pytest.mark.slow

NUM_CLIENTS, NUM_TURNS = 24, 3
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


class RestlessClient:
    """Runs a few turns of a job and abandons some. Clients share jobs, so turns overlap and branch."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        self._job_id = f"job-{number % 10}"
        self._messages = [{"role": "system", "content": "system " * 40}, self._user(100)]
        self.statuses: list[int] = []

    def _user(self, max_words: int) -> dict[str, str]:
        words = (self._random.choice(WORDS) for _ in range(self._random.randint(1, max_words)))
        return {"role": "user", "content": " ".join(words)}

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": self._messages,
            "max_tokens": self._random.randint(1, 40),
            "n": self._random.choice([1, 1, 1, 2]),
            "stop": self._random.choice([[], [], ["e"]]),
            "is_last_step": self._random.random() < 0.1,
        }
        return body | ({"job_id": self._job_id} if self._random.random() < 0.8 else {})

    async def run(self, http: httpx.AsyncClient) -> None:
        for _ in range(NUM_TURNS):
            if self._random.random() < 0.25:
                await self._leave(http)
            await self._stream(http)
            self._messages += [{"role": "assistant", "content": "some reply"}, self._user(60)]

    async def _leave(self, http: httpx.AsyncClient) -> None:
        """Abandons a request after a moment, at whatever point it is."""
        with suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(self._random.random()):
                await http.post("/v1/chat/completions", json=self._body())

    async def _stream(self, http: httpx.AsyncClient) -> None:
        """Reads a stream, in a third of the cases only its first lines."""
        num_lines = self._random.choice([3, 1000, 1000])
        body = self._body() | {"stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            self.statuses.append(response.status_code)
            async for _ in response.aiter_lines():
                num_lines -= 1
                if num_lines == 0:
                    break


@pytest.mark.parametrize("planning", ["--no-async-scheduling", "--async-scheduling"])
def test_nothing_stays_behind(planning: str, tmp_path: Path) -> None:
    """With device and host pools much too small and a disk tier, every streamed request succeeds, every block
    is freed, and the trace of it replays without a difference."""
    model = make_model_folder(tmp_path / "model", max_position_embeddings=1024)
    trace = tmp_path / "trace.jsonl"
    arguments = [
        *(str(model), "--host", "127.0.0.1", "--port", "0", planning),
        *("--num-gpu-blocks-override", "120", "--kv-offloading-size", "0.002", "--trace", str(trace)),
        *("--kv-offloading-disk-size", "0.01", "--kv-offloading-disk-path", str(tmp_path)),
        *("--kv-offloading-disk-min-tokens", "16"),
    ]
    clients = [RestlessClient(number) for number in range(NUM_CLIENTS)]

    async def run(base_url: str) -> None:
        async with httpx.AsyncClient(base_url=base_url, timeout=60) as http:
            await asyncio.gather(*(client.run(http) for client in clients))
            # Only the last disconnects may still be under way; the test's time limit bounds the loops.
            while not (await http.post("/reset_prefix_cache")).json()["success"]:
                pass
            while any((await gauges(http)).values()):
                pass

    with ServerProcess(arguments, tmp_path / "server.log") as server:
        asyncio.run(run(server.base_url))
        assert server.stop() == 0
    assert {status for client in clients for status in client.statuses} == {200}
    assert "Traceback" not in (tmp_path / "server.log").read_text()
    ends = Counter(type(event) for event in read_trace(trace))
    steps = [event for event in read_trace(trace) if isinstance(event, StepDecision)]
    assert sum(step.written_blocks for step in steps) > 50
    assert sum(sum(step.disk_loads.values()) for step in steps) > 10, "nothing was read from disk"
    assert ends[RequestsEnded] > 5, "nobody hung up"
    assert ends[SignalEvent] > 20
    assert main(["trace", "replay", str(trace)]) == 0


async def gauges(http: httpx.AsyncClient) -> dict[str, float]:
    """Returns the numbers of running and waiting requests and of held pins or blocks."""
    lines = (await http.get("/metrics")).text.splitlines()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {
        n: values[n] for n in (*(f"vllm:{n}" for n in names), "continuum:pins", "continuum:pinned_blocks")
    }

"""``python -m benchmarks.http.early_results``: what it saves to send a tool's result as it comes.

Agents call a tool whose result has 4,000 tokens, in ten parts. One of two sends each part when it has it, as
a request that only prewarms; the other sends all with its next turn, as clients do today. It measures the
time to the first token of that turn, and, of a client beside it that asks all the time, its longest gaps.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.cpu.models import MODELS
from eval.load.server_process import ServerProcess

RESULT_TOKENS = 4000
PARTS = 10
TASK_TOKENS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True, help="folder for the model, made if missing")
    parser.add_argument("--model", choices=sorted(MODELS), default="small", help="(default: small)")
    parser.add_argument("--agents", type=int, default=3, help="agents of each kind (default: 3)")
    parser.add_argument("--part-s", type=float, default=6.0, help="seconds between two parts (default: 6)")
    args = parser.parse_args()
    folder = MODELS[args.model].folder(args.models)
    flags = [str(folder), "--port", "0", "--device", "cpu", "--max-model-len", "6144"]
    with tempfile.TemporaryDirectory() as base, ServerProcess(flags, Path(base) / "log") as server:
        asyncio.run(_measure(server.base_url, args.agents, args.part_s))


async def _measure(url: str, num_agents: int, part_s: float) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        await _agent(http, -1, 0.0, is_early=True)
        for beside in (False, True):
            first: dict[bool, list[float]] = {False: [], True: []}
            gaps: dict[bool, list[float]] = {False: [], True: []}
            for number in range(num_agents):
                for is_early in (False, True):
                    other = asyncio.create_task(_talk(http, gaps[is_early])) if beside else None
                    first[is_early].append(await _agent(http, number, part_s, is_early=is_early))
                    if other is not None:
                        other.cancel()
                        with suppress(asyncio.CancelledError):
                            await other
            _tell("beside another client" if beside else "alone", first, gaps)


def _tell(where: str, first: dict[bool, list[float]], gaps: dict[bool, list[float]]) -> None:
    late, early = (statistics.median(first[each]) for each in (False, True))
    print(f"{where}: first token after {late:.2f} s; with early results {early:.2f} s, {early / late:.2f} x")
    for is_early, each in gaps.items():
        if each:
            p99 = statistics.quantiles(each, n=100)[98]
            print(f"  the other's p99 gap, {'with early results' if is_early else 'without'}: {p99:.3f} s")


async def _agent(http: httpx.AsyncClient, number: int, part_s: float, *, is_early: bool) -> float:
    """Runs a turn, its tool and the next turn; returns the seconds to that one's first token. A tool whose
    result comes as a whole is not waited for: it makes no difference."""
    random = Random(f"{number} {is_early}")
    name = f"agent-{number}-{is_early}-{time.monotonic()}"
    task, result = ([random.randrange(1000, 9000) for _ in range(n)] for n in (TASK_TOKENS, RESULT_TOKENS))
    asked: dict[str, Any] = {"job_id": name, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
    first = (await http.post("/v1/completions", json={**asked, "prompt": task})).raise_for_status().json()
    await http.post(f"/v1/jobs/{name}/signals", json={"state": "started", "expected_s": PARTS * part_s})
    said = task + first["choices"][0]["token_ids"]
    for part in range(1, PARTS if is_early else 1):
        due = time.perf_counter() + part_s
        so_far = said + result[: RESULT_TOKENS * part // PARTS]
        early = {**asked, "prompt": so_far, "prompt_cache_options": {"prewarm": True}}
        (await http.post("/v1/completions", json=early)).raise_for_status()
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
    begun = time.perf_counter()
    body = {**asked, "prompt": said + result, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                return time.perf_counter() - begun
    raise RuntimeError("no token came")


async def _talk(http: httpx.AsyncClient, gaps: list[float]) -> None:
    """Asks one streamed request after another, and notes the times between tokens."""
    while True:
        body = {"prompt": [5] * 64, "max_tokens": 64, "ignore_eos": True, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            last: float | None = None
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if last is not None:
                        gaps.append(now - last)
                    last = now


if __name__ == "__main__":
    main()

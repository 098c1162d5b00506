"""How long a quiet tenant waits next to one that floods, and how often it is refused: ``python -m
tests.reliability.noisy_neighbor``. Starts a server for each setting and prints a line for it.

The quiet tenant sends a small request now and then: first alone, then while the other tenant keeps a number
of requests open, each replaced as soon as it is answered. The flood runs in a separate process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import httpx

from eval.agent_model import folder
from tests.api.server import running_server

NOISY, QUIET, OPERATOR = "sk-noisy", "sk-quiet", "sk-operator"
PAUSE_S = 0.1
"""The pause between an answer to the quiet tenant and its next request."""
REFUSED_PAUSE_S = 0.05
SETTINGS: dict[str, tuple[str, ...]] = {
    "no limits": (),
    "fcfs": ("--scheduling-policy", "fcfs"),
    "--max-num-queued-reqs 100": ("--max-num-queued-reqs", "100"),
    "two front ends, 100": ("--max-num-queued-reqs", "100", "--api-server-count", "2"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    took_s: float


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def ask(url: str, key: str, text: str, max_tokens: int) -> Answer:
    """Sends a request over a new connection with a minimal client, so that the client adds little time."""
    where = urlsplit(url)
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"messages": messages, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"x-api-key: {key}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(head.encode() + body)
    answer = await reader.read()
    took_s = time.perf_counter() - began
    writer.close()
    return Answer(int(answer[9:12] or 0), took_s)


async def flood(url: str, num_at_once: int, max_tokens: int, told: Connection) -> Counter[int]:
    """Floods until a message arrives on ``told``."""
    statuses: Counter[int] = Counter()

    async def again_and_again(number: int) -> None:
        turn = 0
        while not told.poll():
            turn += 1
            words = " ".join(f"w{(number * 37 + turn * 11 + place) % 997}" for place in range(60))
            answer = await ask(url, NOISY, f"{number} {turn} {words}", max_tokens)
            statuses[answer.status] += 1
            if answer.status != httpx.codes.OK:
                await asyncio.sleep(REFUSED_PAUSE_S)

    await asyncio.gather(*(again_and_again(number) for number in range(num_at_once)))
    return statuses


def run_flood(url: str, num_at_once: int, max_tokens: int, told: Connection) -> None:
    told.send(dict(asyncio.run(flood(url, num_at_once, max_tokens, told))))


async def quiet(url: str, name: str, seconds: float) -> list[Answer]:
    answers: list[Answer] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not answers:
        answers.append(await ask(url, QUIET, f"hello {name} {len(answers)}", 4))
        await asyncio.sleep(PAUSE_S)
    return answers


async def where_time_went(url: str, num_turns: int) -> str:
    """Medians of the engine's times for the quiet tenant's last turns."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        params, headers = {"limit": min(num_turns, 100)}, {"x-api-key": OPERATOR}
        jobs = (await http.get("/v1/jobs", params=params, headers={"x-api-key": QUIET})).json()
        turns = []
        for job in jobs.get("data", []):
            life = (await http.get(f"/dashboard/jobs/{job['id']}", headers=headers)).json()
            turns += life["past_turns"]
    if not turns:
        return "-"
    return ", ".join(
        f"{part} {1e3 * statistics.median(turn[f'{part}_s'] for turn in turns):.0f} ms"
        for part in ("queue", "prefill", "decode")
    )


async def measure(url: str, num_at_once: int, max_tokens: int, seconds: float) -> str:
    await quiet(url, "warm-up", 0.5)
    alone = [answer.took_s for answer in await quiet(url, "alone", seconds)]
    here, there = multiprocessing.Pipe()
    flooding = multiprocessing.get_context("spawn").Process(
        target=run_flood, args=(url, num_at_once, max_tokens, there)
    )
    flooding.start()
    await asyncio.sleep(3.0)
    beside = await quiet(url, "beside", 2 * seconds)
    told = await where_time_went(url, len(beside))
    here.send("stop")
    statuses = await asyncio.to_thread(here.recv)
    flooding.join()
    answered = [answer.took_s for answer in beside if answer.status == httpx.codes.OK] or [float("inf")]
    parts = []
    for name, share in (("median", 0.5), ("p99", 0.99)):
        before, after = percentile(alone, share), percentile(answered, share)
        parts.append(f"{name} {before * 1e3:.0f} -> {after * 1e3:.0f} ms ({after / before:.1f}x)")
    refused = sum(answer.status != httpx.codes.OK for answer in beside)
    return f"{', '.join(parts)}, {refused} of {len(beside)} refused; the flood got {statuses}; {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, default=150, help="requests of the flood at a time")
    parser.add_argument("--tokens", type=int, default=16, help="that each of them asks for")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the quiet tenant alone")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    args = parser.parse_args()
    keys = ("--api-key", f"noisy:{NOISY}", f"quiet:{QUIET}", OPERATOR)
    common = ("--kv-cache-memory-bytes", "64M", "--max-num-seqs", "32", *keys)
    for name in args.settings:
        with running_server(folder(), *common, *SETTINGS[name]) as server:
            told = asyncio.run(measure(server.url, args.at_once, args.tokens, args.seconds))
            print(f"{name}: {told}", flush=True)
            server.interrupt()


if __name__ == "__main__":
    main()

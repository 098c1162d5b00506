"""``python -m benchmarks.http.neighbours``: what a quiet client feels of others, on one server.

A client asks one streamed request after another: alone, beside a scrape of ``/metrics`` 20 times a second,
and beside three keys of a key file that ask without a pause, of which each may have two requests at once.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from engine.worker.loading.tiny_models import make_model_folder
from eval.load.server_process import ServerProcess

NAMES = ("one", "two", "three")
KEYS = "[quiet]\nkey = 'key-of-quiet'\n" + "".join(
    f"[{name}]\nkey = 'key-of-{name}'\nrunning_requests = 2\nper_minute = {{ requests = 400 }}\n"
    for name in NAMES
)
SCRAPES_PER_S = 20
NUM_TOKENS = 16


@dataclass(slots=True)
class Felt:
    """What the quiet client measured, in seconds."""

    answers: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    """Times to the first token."""
    gaps: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each phase (default: 20)")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        keys = base / "keys.toml"
        keys.write_text(KEYS)
        model = make_model_folder(base / "model")
        flags = [str(model), "--port", "0", "--device", "cpu", "--api-key-file", str(keys)]
        with ServerProcess(flags, base / "log") as server:
            asyncio.run(_measure(server.base_url, seconds))


async def _measure(url: str, seconds: float) -> None:
    felt = {"alone": await _phase(url, seconds)}
    async with _beside(_scrape, url):
        felt["a scrape, 20 times a second"] = await _phase(url, seconds)
    felt["alone again"] = await _phase(url, seconds)
    done = dict.fromkeys(NAMES, 0)
    refused = dict.fromkeys(NAMES, 0)
    async with _beside(lambda each: _flood(each, done, refused), url):
        felt["a flood from three keys"] = await _phase(url, seconds)
    alone = felt["alone"]
    for what, each in felt.items():
        print(
            f"{what:26} {len(each.answers):4} answers {_told(each.answers, alone.answers)}; first token "
            f"{_told(each.firsts, alone.firsts)}; gap {_told(each.gaps, alone.gaps)}"
        )
    await _tell_keys(url, done, refused)


async def _phase(url: str, seconds: float) -> Felt:
    felt = Felt()
    end = time.monotonic() + seconds
    async with _client(url, "quiet") as http:
        while time.monotonic() < end:
            begun = last = time.perf_counter()
            body = {**_body(), "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    now = time.perf_counter()
                    if line.startswith("data: {"):
                        (felt.firsts if last == begun else felt.gaps).append(now - last)
                        last = now
            felt.answers.append(time.perf_counter() - begun)
            await asyncio.sleep(0.05)
    return felt


@asynccontextmanager
async def _beside(work: Callable[[str], AsyncIterator[None]], url: str) -> AsyncIterator[None]:
    async def run() -> None:
        async for _ in work(url):
            pass

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _scrape(url: str) -> AsyncIterator[None]:
    async with _client(url, "quiet") as http:
        while True:
            (await http.get("/metrics")).raise_for_status()
            yield
            await asyncio.sleep(1 / SCRAPES_PER_S)


async def _flood(url: str, done: dict[str, int], refused: dict[str, int]) -> AsyncIterator[None]:
    async def ask(name: str, number: int) -> None:
        async with _client(url, name) as http:
            while True:
                number += 1
                answer = await http.post("/v1/completions", json=_body(number))
                (done if answer.status_code == 200 else refused)[name] += 1
                await asyncio.sleep(0.01 if answer.status_code == 429 else 0)

    await asyncio.gather(*(ask(name, place * 100_000) for name in NAMES for place in range(4)))
    yield


async def _tell_keys(url: str, done: dict[str, int], refused: dict[str, int]) -> None:
    for name in NAMES:
        async with _client(url, name) as http:
            (line,) = (await http.get("/v1/usage")).json()["data"]
        total = ", ".join(f"{value} {what}" for what, value in line["total"].items())
        print(f"key {name:6} {done[name]} answered, {refused[name]} refused; counted: {total}")


def _client(url: str, name: str) -> httpx.AsyncClient:
    # Reading the system's certificates would hold up all clients of this process.
    headers = {"Authorization": f"Bearer key-of-{name}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=60, verify=False)


def _body(number: int = 0) -> dict[str, object]:
    prompt = [10 + (number + place) % 200 for place in range(64)]
    return {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}


def _told(values: list[float], alone: list[float]) -> str:
    """Median and 99th percentile, and the latter as a multiple of what it was alone."""
    median, p99 = statistics.median(values), _p99(values)
    return f"{median * 1e3:.1f} / {p99 * 1e3:.1f} ms ({p99 / _p99(alone):.2f}x)"


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


if __name__ == "__main__":
    main()

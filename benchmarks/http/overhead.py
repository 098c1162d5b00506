"""``make bench``: measures the overhead between client and engine, with a model that costs almost nothing.

The same requests go to the engine in this process (AsyncLLM) and over HTTP to servers with one API server and
with several, in turns, so that other work on the machine affects all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicyFactory
from engine.config.engine_config import EngineConfig, TraceConfig
from engine.core_process.core_client import AsyncMPClient
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import CoreProcess
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.llm import engine_config
from engine.model_executor import model_executor
from engine.records.messages import JobRef, RequestContext
from engine.records.sampling_params import RequestOutputKind, SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from eval.load.plain_http import Connection
from eval.load.server_process import ServerProcess, unwound_by_sigterm
from tracing.events import StepDecision
from tracing.reader import read_trace

PATH = "/v1/completions"
PROMPT = "One two three four five six seven."
CONCURRENCIES = (1, 32)
STREAM_TOKENS = 200
NUM_BLOCKS = 2000


class Caller(Protocol):
    """A client of the engine, over one path."""

    async def ask(self) -> None:
        """Requests a completion of one token."""

    async def stream(self) -> list[float]:
        """Requests a completion of STREAM_TOKENS; returns when each of them arrived."""


class EngineCaller:
    """Calls the engine in this process."""

    def __init__(self, engine: AsyncLLM, name: str) -> None:
        self._engine = engine
        self._name = name
        self._count = 0

    async def ask(self) -> None:
        await self._generate(1)

    async def stream(self) -> list[float]:
        return await self._generate(STREAM_TOKENS)

    async def _generate(self, max_tokens: int) -> list[float]:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._count += 1
        arrivals: list[float] = []
        request_id = f"{self._name}-{self._count}"
        context = RequestContext(job=JobRef())
        outputs = self._engine.generate(PROMPT, params, request_id, context)
        async for output in outputs:
            arrivals += [time.monotonic()] * len(output.outputs[0].token_ids)
        return arrivals


class HttpCaller:
    """Calls a server over one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        self._one_token = connection.request("POST", PATH, msgspec.json.encode(body))
        body |= {"max_tokens": STREAM_TOKENS, "stream": True}
        self._stream = connection.request("POST", PATH, msgspec.json.encode(body))

    async def ask(self) -> None:
        await self._connection.ask(self._one_token)

    async def stream(self) -> list[float]:
        answer = await self._connection.ask(self._stream)
        return [moment for moment, _ in answer.events()][:STREAM_TOKENS]


@dataclass(slots=True)
class Way:
    """A path to the engine, and its measurements, round by round."""

    name: str
    trace: Path
    callers: list[Caller] = field(default_factory=list)
    requests_per_s: dict[int, list[float]] = field(
        default_factory=lambda: {number: [] for number in CONCURRENCIES}
    )
    tokens_per_s: list[float] = field(default_factory=list)
    """Tokens per second of concurrent streams, one per caller."""
    streams: list[list[float]] = field(default_factory=list)
    """Times at which the tokens of single streams arrived."""

    async def measure(self, seconds: float) -> None:
        """Measures one round."""
        for concurrency, rates in self.requests_per_s.items():
            rates.append(await self._rate([each.ask for each in self.callers[:concurrency]], seconds))
        self.tokens_per_s.append(
            STREAM_TOKENS * await self._rate([each.stream for each in self.callers], seconds)
        )
        await self._rate([self._stream_alone], seconds)

    async def _stream_alone(self) -> None:
        self.streams.append(await self.callers[0].stream())

    @staticmethod
    async def _rate(calls: Sequence[Callable[[], Awaitable[object]]], seconds: float) -> float:
        """Returns calls per second; each caller calls again as soon as it is answered."""
        began = time.perf_counter()

        async def call_on(call: Callable[[], Awaitable[object]]) -> int:
            count = 0
            while time.perf_counter() - began < seconds:
                await call()
                count += 1
            return count

        counts = await asyncio.gather(*[call_on(call) for call in calls])
        return sum(counts) / (time.perf_counter() - began)

    def latencies_s(self) -> list[float]:
        """Returns times from the end of a token's step to its arrival at the client, over all single streams.

        The engine begins a step once it has sent the previous one's tokens; the trace records when.
        """
        steps = [
            event.now
            for event in read_trace(self.trace)
            if isinstance(event, StepDecision) and event.total_tokens
        ]
        found: list[float] = []
        for arrivals in self.streams:
            last = bisect_right(steps, arrivals[-1])
            ends = steps[last - STREAM_TOKENS + 1 : last]  # of all but the last token's step
            found += [arrival - end for arrival, end in zip(arrivals, ends, strict=False)]
        return found


async def measure(folder: Path, model: Path, counts: Sequence[int], rounds: int, seconds: float) -> list[Way]:
    """Measures all paths in turns; each round begins with another one."""
    with ExitStack() as stack:
        ways = [in_process(folder, model, stack)]
        for count in counts:
            ways.append(await over_http(folder, model, stack, count))
        for number in range(rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                await way.measure(seconds)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return ways


def in_process(folder: Path, model: Path, stack: ExitStack) -> Way:
    trace = folder / "engine.jsonl"
    config = traced(engine_config(str(model), num_gpu_blocks_override=NUM_BLOCKS), trace)
    spec = CoreSpec(config, model_executor, ContinuumPolicyFactory(ContinuumConfig()))
    engine = AsyncLLM(config, AsyncMPClient(CoreProcess(spec)))
    stack.callback(engine.shutdown)
    callers: list[Caller] = [EngineCaller(engine, f"caller-{number}") for number in range(max(CONCURRENCIES))]
    return Way("AsyncLLM, no HTTP", trace, callers)


def traced(config: EngineConfig, trace: Path) -> EngineConfig:
    return replace(config, trace=TraceConfig(trace_path=str(trace)))


async def over_http(folder: Path, model: Path, stack: ExitStack, num_api_servers: int) -> Way:
    trace = folder / f"http-{num_api_servers}.jsonl"
    arguments = [
        *(str(model), "--host", "127.0.0.1", "--port", "0", "--num-gpu-blocks-override", str(NUM_BLOCKS)),
        *("--api-server-count", str(num_api_servers), "--trace", str(trace)),
    ]
    server = stack.enter_context(ServerProcess(arguments, folder / f"http-{num_api_servers}.log"))
    way = Way(f"HTTP, {num_api_servers} API server{'s' if num_api_servers > 1 else ''}", trace)
    for _ in range(max(CONCURRENCIES)):
        connection = Connection(server.base_url)
        stack.callback(connection.close)
        way.callers.append(HttpCaller(connection))
        await way.callers[-1].ask()
    return way


# ---- the report ----


def report(ways: Sequence[Way]) -> str:
    """Returns the results, each path next to the engine without HTTP."""
    floor = ways[0]
    lines = ["Requests per second of 1-token completions: median of the rounds (lowest to highest)"]
    for concurrency in CONCURRENCIES:
        lines += ["", f"  {concurrency} at a time"]
        rates = [way.requests_per_s[concurrency] for way in ways]
        lines += [_rate_line(way.name, each, rates[0]) for way, each in zip(ways, rates, strict=True)]
    lines += ["", f"Tokens per second of {max(CONCURRENCIES)} streams of {STREAM_TOKENS} tokens", ""]
    lines += [_rate_line(way.name, way.tokens_per_s, floor.tokens_per_s) for way in ways]
    lines += [
        "",
        "Latency of a streamed token, from the end of its step to the client, one stream, in ms",
        "",
    ]
    lines.append(f"    {'':<20} {'p50':>8} {'p99':>8}   {'added':>8} {'added':>8}")
    base = _quantiles_ms(floor)
    for way in ways:
        p50, p99 = _quantiles_ms(way)
        added = "" if way is floor else f"   {p50 - base[0]:>+8.3f} {p99 - base[1]:>+8.3f}"
        lines.append(f"    {way.name:<20} {p50:>8.3f} {p99:>8.3f}{added}")
    return "\n".join(lines)


def _rate_line(name: str, rates: Sequence[float], floor: Sequence[float]) -> str:
    """Formats rates and their ratio: the median of the rounds' ratios, as what slows one round slows both."""
    spread = f"({min(rates):,.0f} to {max(rates):,.0f})"
    ratio = statistics.median(rate / best for rate, best in zip(rates, floor, strict=True))
    return f"    {name:<20} {statistics.median(rates):>8,.0f} {spread:<20} {ratio:.2f}x"


def _quantiles_ms(way: Way) -> tuple[float, float]:
    cuts = statistics.quantiles(way.latencies_s(), n=100)
    return cuts[49] * 1e3, cuts[98] * 1e3


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, metavar="ROUNDS", help="turns of all ways (7)")
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="SECONDS", help="of each measurement in a round (2)"
    )
    parser.add_argument(
        "--front-ends",
        type=int,
        nargs="+",
        default=[1, 2],
        metavar="PROCESSES",
        help="numbers of API server processes to measure (1 2)",
    )
    args = parser.parse_args(argv)
    if args.rounds < 1 or not args.seconds > 0 or min(args.front_ends) < 1:
        parser.error("--rounds and --front-ends must be at least 1, and --seconds above 0")
    # A model so small gains nothing from threads; processes that share two cores lose by them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with unwound_by_sigterm(), tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        model = make_model_folder(folder / "tiny")
        ways = asyncio.run(measure(folder, model, args.front_ends, args.rounds, args.seconds))
        print(report(ways))
    return 0


if __name__ == "__main__":
    sys.exit(main())

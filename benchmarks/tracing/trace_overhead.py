"""``make bench-watch``: measures the cost of a viewer and of a trace, with the bundled or another small
model.

A server's engine runs under a steady load; its trace is switched on and off between short windows. Each round
has every state once and "off" twice, in random order, so that other work on the machine affects all states.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicyFactory
from engine.api.config import ServerConfig
from engine.api.dashboard.audience import Viewers
from engine.api.service.server import Server
from engine.config.engine_config import TraceConfig
from engine.core_process.core_client import AsyncMPClient
from engine.core_process.core_start import CoreSpec
from engine.core_process.launcher import CoreProcess
from engine.errors import EngineError
from engine.frontend.async_llm import AsyncLLM
from engine.frontend.llm import engine_config
from engine.model_executor import model_executor
from engine.records.messages import JobRef, RequestContext
from engine.records.sampling_params import RequestOutputKind, SamplingParams
from engine.worker.loading.tiny_models import make_model_folder
from eval.agent_model import folder as box_folder
from eval.load.server_process import unwound_by_sigterm
from eval.report.intervals import Estimate, ratio_interval

PROMPT = "One two three four five six seven."
NUM_BLOCKS = 2000
SETTLE_S = 0.3
"""Pause after a switch, before anything is counted: files are opened, and the last batch of a trace is
written."""
NO_MODEL = "nothing"
GOAL = 0.98
"""Share of the throughput without a trace that must be left with one."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""Resolution of processor times."""
OFF = "off"
AGAIN = "off again"
ENDINGS = {"on": ".jsonl", "on, compressed": ".jsonl.zst"}
WATCHED = "watched"
"""Trace off, while someone looks at the dashboard."""
STATES = (OFF, *ENDINGS, WATCHED, AGAIN)


@dataclass(frozen=True, slots=True)
class Window:
    """Measurements of one window."""

    tokens_per_s: float
    cpu_s_per_token: float
    """CPU time of the engine core's process, all its threads, including the one that writes the trace."""


@dataclass(slots=True)
class Load:
    """Streams that never end: each is followed by the next."""

    engine: AsyncLLM
    num_streams: int
    stream_tokens: int
    num_tokens: int = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._stream_on(number)) for number in range(self.num_streams)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks)

    async def _stream_on(self, number: int) -> None:
        """Generates forever. The first stream is shorter than the others, by an amount that depends on
        ``number``, so that streams do not all begin and end together, and windows are alike."""
        num_tokens = 1 + number * self.stream_tokens // self.num_streams
        for count in itertools.count():
            async for output in self.engine.generate(
                PROMPT, self._params(num_tokens), f"{number}-{count}", RequestContext(job=JobRef())
            ):
                self.num_tokens += len(output.outputs[0].token_ids)
            num_tokens = self.stream_tokens

    @staticmethod
    def _params(num_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=num_tokens, temperature=0.0, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )

    async def window(self, seconds: float) -> Window:
        """Measures for ``seconds``, or longer until there is at least one token."""
        began = time.perf_counter()
        before = self.num_tokens
        cpu_before_s = _cpu_s(self.engine.core_pid)
        num_tokens = 0
        while not num_tokens:
            await asyncio.sleep(seconds)
            num_tokens = self.num_tokens - before
        passed_s = time.perf_counter() - began
        cpu_s = max(TICK_S, _cpu_s(self.engine.core_pid) - cpu_before_s)
        return Window(num_tokens / passed_s, cpu_s / num_tokens)


def _cpu_s(pid: int) -> float:
    """Returns the processor time that all threads of a process have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


@dataclass(slots=True)
class Measured:
    """Measurements of one state, round by round."""

    windows: list[Window] = field(default_factory=list)
    num_events: int = 0
    num_dropped: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    """Time with the trace on."""


async def measure(
    engine: AsyncLLM, folder: Path, load: Load, rounds: int, seconds: float
) -> dict[str, Measured]:
    """Measures all states in each round."""
    found = {state: Measured() for state in STATES}
    audience = Viewers(Server(engine, ServerConfig(served_model_names=("tiny",))))
    chance = random.Random(0)
    async with load.running():
        await load.window(seconds)  # warm-up
        for number in range(rounds):
            for state in chance.sample(STATES, len(STATES)):
                if state == WATCHED:
                    found[state].windows.append(await _watched_window(audience, load, seconds))
                else:
                    await _measure_window(engine, folder, load, found[state], ENDINGS.get(state), seconds)
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


async def _measure_window(
    engine: AsyncLLM, folder: Path, load: Load, measured: Measured, ending: str | None, seconds: float
) -> None:
    if ending is None:
        await asyncio.sleep(SETTLE_S)
        measured.windows.append(await load.window(seconds))
        return
    path = folder / f"trace{ending}"
    began = time.perf_counter()
    await engine.switch_trace(True, path.name)
    await asyncio.sleep(SETTLE_S)
    measured.windows.append(await load.window(seconds))
    state = await engine.switch_trace(False)
    measured.seconds += time.perf_counter() - began
    measured.num_events += state.written
    measured.num_dropped += state.dropped
    measured.num_bytes += path.stat().st_size
    path.unlink()


async def _watched_window(audience: Viewers, load: Load, seconds: float) -> Window:
    """Measures while an API server polls the core, some times a second, as for the dashboard."""
    watching = asyncio.create_task(_watch(audience))
    try:
        await asyncio.sleep(SETTLE_S)
        return await load.window(seconds)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def _watch(audience: Viewers) -> None:
    async with aclosing(audience.views()) as views:
        async for _ in views:
            pass


def report(found: dict[str, Measured]) -> str:
    """Compares each state with "off" of the same rounds."""
    speed = {state: [window.tokens_per_s for window in each.windows] for state, each in found.items()}
    cpu = {state: [1e6 * window.cpu_s_per_token for window in each.windows] for state, each in found.items()}
    lines = [
        "By the state of the trace, under a steady load: the ratio to off in the same round",
        "(geometric mean of the rounds, 95 % interval; off again against off is the noise)",
        *("", "  Tokens per second"),
        *_table(speed),
        *("", "  Processor time of the engine core per token, in microseconds"),
        *_table(cpu),
        "",
    ]
    lines += [f"  {state}: {_written(found[state])}" for state in ENDINGS]
    lines += [
        f"  {state}: throughput {verdict(_ratio(speed[OFF], speed[state]))}" for state in (*ENDINGS, WATCHED)
    ]
    return "\n".join(lines)


def _table(values: dict[str, list[float]]) -> Iterator[str]:
    for state in STATES:
        ratio = "" if state == OFF else told(_ratio(values[OFF], values[state]))
        yield f"    {state:<16} {statistics.fmean(values[state]):>9,.0f}   {ratio}"


def _ratio(base: Sequence[float], rates: Sequence[float]) -> Estimate:
    estimate = ratio_interval(list(zip(base, rates, strict=True)))
    assert estimate is not None, "a window without a token"
    return estimate


def told(estimate: Estimate) -> str:
    """Formats a ratio and its interval."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.4f}"
    return f"{estimate.value:.4f} ({estimate.low:.4f} to {estimate.high:.4f})"


def _written(measured: Measured) -> str:
    return (
        f"{measured.num_events / measured.seconds:,.0f} events and "
        f"{measured.num_bytes / measured.seconds / 1e6:.2f} MB a second, {measured.num_dropped:,} dropped"
    )


def verdict(estimate: Estimate) -> str:
    """Says, for a ratio of throughputs, how much is lost, and whether that is within the goal."""
    lost = 100 * (1 - estimate.value)
    cost = f"is {abs(lost):.1f} % {'less' if lost >= 0 else 'more'}"
    if estimate.low is None or estimate.high is None or estimate.low < GOAL <= estimate.high:
        return f"{cost}; these rounds cannot tell whether that is within {100 * (1 - GOAL):.0f} %"
    return f"{cost}: within {100 * (1 - GOAL):.0f} %" if estimate.low >= GOAL else f"{cost}: TOO MUCH"


def model_folder(name: str, folder: Path) -> str:
    """Returns the folder that ``--model`` names; makes a small model within ``folder`` for NO_MODEL."""
    return name if name != NO_MODEL else str(make_model_folder(folder / NO_MODEL))


async def run(model: str, folder: Path, args: argparse.Namespace) -> str:
    config = engine_config(model, num_gpu_blocks_override=NUM_BLOCKS)
    config = replace(config, trace=TraceConfig(trace_dir=str(folder)))
    spec = CoreSpec(config, model_executor, ContinuumPolicyFactory(ContinuumConfig()))
    engine = AsyncLLM(config, AsyncMPClient(CoreProcess(spec)))
    try:
        load = Load(engine, args.streams, args.tokens)
        return report(await measure(engine, folder, load, args.rounds, args.seconds))
    finally:
        engine.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-watch", description=__doc__)
    parser.add_argument(
        "--model",
        default=str(box_folder()),
        metavar="FOLDER",
        help="what runs (the bundled model); 'nothing' is one that is made for it and costs next to "
        "nothing: nearly all is the engine's own work then",
    )
    parser.add_argument("--rounds", type=int, default=20, metavar="ROUNDS", help="each has all states (20)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="SECONDS", help="of each window (2)")
    parser.add_argument("--streams", type=int, default=32, metavar="STREAMS", help="at once (32)")
    parser.add_argument("--tokens", type=int, default=200, metavar="TOKENS", help="of each stream (200)")
    args = parser.parse_args(argv)
    if min(args.rounds, args.streams, args.tokens) < 1 or not args.seconds > 0:
        parser.error("--rounds, --streams and --tokens must be at least 1, and --seconds above 0")
    # A model so small gains nothing from threads; processes that share two cores lose by them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with unwound_by_sigterm(), tempfile.TemporaryDirectory(prefix="trace-overhead-") as name:
        folder = Path(name)
        try:
            print(asyncio.run(run(model_folder(args.model, folder), folder / "traces", args)))
        except EngineError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``make bench-trace``: what a trace costs, step by step, beside the model in the box or another small one.

Engines that do the very same work, two without a trace and two with one, take turns at every step in an order
drawn anew: whatever else the machine does meets all of them. ``eval.trace_overhead`` measures whole servers.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from threadpoolctl import threadpool_limits

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicyFactory
from engine.clock import MonotonicClock
from engine.config import TraceConfig
from engine.engine_core import EngineCore
from engine.errors import EngineError
from engine.llm import engine_config, uniproc_executor
from engine.messages import EngineCoreRequest, JobRef
from engine.sampling_params import SamplingParams
from eval.agent_model import folder as box_folder
from eval.intervals import Estimate, ratio_interval
from eval.server_process import unwound_by_sigterm
from eval.trace_overhead import NO_MODEL, model_folder, told, verdict

PROMPT_TOKENS = 48
"""Drawn at random: they mean nothing."""
NUM_BLOCKS = 2000
STEPS_PER_BLOCK = 20
"""Steps that are summed before engines are compared: a trace costs most at the steps where a request ends."""
WARM_UP_BLOCKS = 3
OFF, ON, COMPRESSED, AGAIN = "off", "on", "on, compressed", "off again"
ENDINGS = {OFF: None, ON: ".jsonl", COMPRESSED: ".jsonl.zst", AGAIN: None}


@dataclass(slots=True)
class Costs:
    """Of one engine, seconds for each block of steps."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of the thread that steps."""
    writer_s: list[float] = field(default_factory=list)
    """Processor time of the thread that encodes and writes the trace."""


class Lane:
    """One engine, with streams that never end: each is followed by the next."""

    def __init__(self, model: str, trace: Path | None, num_streams: int, stream_tokens: int) -> None:
        config = engine_config(model, num_gpu_blocks_override=NUM_BLOCKS)
        config = replace(config, trace=TraceConfig(trace_path=None if trace is None else str(trace)))
        threads = set(threading.enumerate())
        policy = ContinuumPolicyFactory(ContinuumConfig())
        self._core = EngineCore(config, uniproc_executor, policy, MonotonicClock())
        self._writer = next(
            (t for t in threading.enumerate() if t not in threads and t.name == "trace-writer"), None
        )
        self._random = random.Random(0)
        self._ids = itertools.count()
        self._stream_tokens = stream_tokens
        for number in range(num_streams):
            # The first of the streams are of all lengths, so that they do not all begin and end together.
            self._add(1 + number * stream_tokens // num_streams)

    def step(self) -> None:
        outputs = self._core.step()
        assert outputs is not None, "streams have ended"
        for output in outputs.outputs:
            if output.finished:
                self._add(self._stream_tokens)

    def writer_s(self) -> float:
        """Processor time that the thread of the trace has used."""
        if self._writer is None or self._writer.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._writer.ident))

    def num_dropped(self) -> int:
        dropped: int = self._core.call_utility("trace_state", []).dropped
        return dropped

    def close(self) -> None:
        self._core.close()

    def _add(self, num_tokens: int) -> None:
        tokens = self._random.choices(range(self._core.ready.vocab_size), k=PROMPT_TOKENS)
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        name = f"stream-{next(self._ids)}"
        self._core.add_request(EngineCoreRequest(name, tokens, params, self._core.now(), job=JobRef()))


def measure(lanes: dict[str, Lane], num_blocks: int) -> dict[str, Costs]:
    """Every engine in every step."""
    chance = random.Random(0)
    for _ in range(WARM_UP_BLOCKS):
        _run_block(lanes, chance)
    found = {state: Costs() for state in lanes}
    for number in range(num_blocks):
        for state, (wall_s, cpu_s, writer_s) in _run_block(lanes, chance).items():
            costs = found[state]
            costs.wall_s.append(wall_s)
            costs.cpu_s.append(cpu_s)
            costs.writer_s.append(writer_s)
        if (number + 1) % 10 == 0:
            print(f"{number + 1} of {num_blocks} blocks of steps", file=sys.stderr, flush=True)
    return found


def _run_block(lanes: dict[str, Lane], chance: random.Random) -> dict[str, tuple[float, float, float]]:
    """Seconds of the steps, of their thread and of the writer's, for each engine."""
    wall_s, cpu_s = dict.fromkeys(lanes, 0.0), dict.fromkeys(lanes, 0.0)
    writers_s = {state: lane.writer_s() for state, lane in lanes.items()}
    for _ in range(STEPS_PER_BLOCK):
        for state in chance.sample(list(lanes), len(lanes)):
            began, began_cpu = time.perf_counter(), time.thread_time()
            lanes[state].step()
            wall_s[state] += time.perf_counter() - began
            cpu_s[state] += time.thread_time() - began_cpu
    return {
        state: (wall_s[state], cpu_s[state], lane.writer_s() - writers_s[state])
        for state, lane in lanes.items()
    }


def report(found: dict[str, Costs]) -> str:
    """Each engine beside "off", block by block."""
    num_blocks = len(found[OFF].wall_s)
    lines = [
        f"What is left of the throughput without a trace, by {num_blocks} blocks of {STEPS_PER_BLOCK} steps",
        "(geometric mean, 95 % interval; off again against off is the noise)",
        "",
        f"  {'':<16} {'µs a step':>10}   {'a core to spare':<28}{'writer on the same core':<28}core time",
    ]
    lines += [_line(state, found[OFF], costs) for state, costs in found.items()]
    lines += ["", *_verdicts(found)]
    return "\n".join(lines)


def _line(state: str, off: Costs, costs: Costs) -> str:
    mean_us = 1e6 * statistics.fmean(costs.wall_s) / STEPS_PER_BLOCK
    if costs is off:
        return f"  {state:<16} {mean_us:>10,.0f}"
    left = (
        _left(off.wall_s, costs.wall_s),
        _left(off.wall_s, _both(costs.wall_s, costs.writer_s)),
        _left(off.cpu_s, _both(costs.cpu_s, costs.writer_s)),
    )
    return f"  {state:<16} {mean_us:>10,.0f}   {told(left[0]):<28}{told(left[1]):<28}{told(left[2])}"


def _verdicts(found: dict[str, Costs]) -> Iterator[str]:
    """By the worst case: no core but the engine's own, so that what the writer does delays the steps."""
    off = found[OFF]
    for state in (ON, COMPRESSED):
        costs = found[state]
        yield f"  {state}: throughput {verdict(_left(off.wall_s, _both(costs.wall_s, costs.writer_s)))}"


def _both(steps_s: Sequence[float], writer_s: Sequence[float]) -> list[float]:
    return [step + writer for step, writer in zip(steps_s, writer_s, strict=True)]


def _left(off_s: Sequence[float], costs_s: Sequence[float]) -> Estimate:
    """Throughput with these costs, over that without a trace."""
    estimate = ratio_interval(list(zip(costs_s, off_s, strict=True)))
    assert estimate is not None, "a block without a step"
    return estimate


def run(model: str, folder: Path, args: argparse.Namespace) -> str:
    folder.mkdir()
    with ExitStack() as stack:
        lanes: dict[str, Lane] = {}
        for state, ending in ENDINGS.items():
            trace = None if ending is None else folder / f"trace{ending}"
            lane = Lane(model, trace, args.streams, args.tokens)
            lanes[state] = stack.enter_context(closing(lane))
        found = measure(lanes, args.blocks)
        dropped = sum(lane.num_dropped() for lane in lanes.values())
        return f"{report(found)}\n  {dropped:,} events dropped"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-trace", description=__doc__)
    parser.add_argument(
        "--model",
        default=str(box_folder()),
        metavar="FOLDER",
        help=f"what runs (the model in the box); '{NO_MODEL}' is one that is made for it and costs next to "
        "nothing: nearly all is the engine's own work then",
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=150,
        metavar="N",
        help=f"of {STEPS_PER_BLOCK} steps of each engine (150)",
    )
    parser.add_argument("--streams", type=int, default=32, metavar="STREAMS", help="at once (32)")
    parser.add_argument("--tokens", type=int, default=200, metavar="TOKENS", help="of each stream (200)")
    args = parser.parse_args(argv)
    if args.blocks < 2 or min(args.streams, args.tokens) < 1:
        parser.error("--blocks must be at least 2, --streams and --tokens at least 1")
    with (
        unwound_by_sigterm(),
        tempfile.TemporaryDirectory(prefix="trace-steps-") as name,
        threadpool_limits(1),  # a step on one core: what is left of the others is the writer's
    ):
        folder = Path(name)
        try:
            print(run(model_folder(args.model, folder), folder / "traces", args))
        except EngineError as error:
            print(error, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

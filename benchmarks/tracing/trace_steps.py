"""``make bench-trace``: measures a trace's cost step by step, with the bundled model or another small one.

Four engines do the same work, two without a trace and two with one, in random order at every step, so that
other work on the machine affects all of them. Each engine plays each part once per round, so that the
placement of its memory, which matters more than a trace, cancels out. ``benchmarks.tracing.trace_overhead``
measures whole servers.
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

from benchmarks.tracing.trace_overhead import NO_MODEL, model_folder, told, verdict
from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicyFactory
from engine.clock import MonotonicClock
from engine.config.engine_config import TraceConfig
from engine.core_process.engine_core import EngineCore
from engine.errors import EngineError
from engine.frontend.llm import engine_config
from engine.model_executor import model_executor
from engine.records.messages import EngineCoreRequest, JobRef
from engine.records.reported_stats import TraceState
from engine.records.sampling_params import SamplingParams
from eval.agent_model import folder as box_folder
from eval.load.server_process import unwound_by_sigterm
from eval.report.intervals import Estimate, ratio_interval
from eval.say import say

PROMPT_TOKENS = 48
"""Prompt tokens are drawn at random: they mean nothing."""
NUM_BLOCKS = 2000
STEPS_PER_BLOCK = 20
"""Steps that are summed before engines are compared: a trace costs most at the steps where a request ends."""
BLOCKS_PER_TURN = 10
"""Blocks of an engine in one part; the n-th blocks of a round's four turns are summed."""
WARM_UP_BLOCKS = 2
"""Blocks of each turn that are not counted, as the trace has just begun."""
SOLO_STEPS = 100
"""Steps of an engine alone at full speed in each turn, to measure its writer's work meanwhile."""
POLL_S = 0.005
OFF = "off"
ON = "on"
COMPRESSED = "on, compressed"
AGAIN = "off again"
ENDINGS = {OFF: None, ON: ".jsonl", COMPRESSED: ".jsonl.zst", AGAIN: None}


@dataclass(slots=True)
class Costs:
    """The costs of one part."""

    wall_s: list[float] = field(default_factory=list)
    """Wall time of each sample, of four blocks by four engines."""
    cpu_s: list[float] = field(default_factory=list)
    """Processor time of the stepping thread, for each sample."""
    writer_s: float = 0.0
    """Processor time of the thread that encodes and writes the trace, during the solo steps."""
    num_solo_steps: int = 0
    num_dropped: int = 0

    @property
    def writer_s_per_sample(self) -> float:
        """Returns the writer's time while an engine makes the steps of a sample at its own speed."""
        steps = STEPS_PER_BLOCK * len(ENDINGS)
        return steps * self.writer_s / self.num_solo_steps


class Lane:
    """One engine, with streams that never end: each is followed by the next."""

    def __init__(self, model: str, traces: Path, num_streams: int, stream_tokens: int) -> None:
        config = engine_config(model, num_gpu_blocks_override=NUM_BLOCKS)
        config = replace(config, trace=TraceConfig(trace_dir=str(traces)))
        policy = ContinuumPolicyFactory(ContinuumConfig())
        self._core = EngineCore(config, model_executor, policy, MonotonicClock())
        self._traces = traces
        self._writer: threading.Thread | None = None
        self._random = random.Random(0)
        self._ids = itertools.count()
        self._stream_tokens = stream_tokens
        for number in range(num_streams):
            # The first streams have different lengths, so that they do not all begin and end together.
            self._add(1 + number * stream_tokens // num_streams)

    def step(self) -> None:
        outputs = self._core.step()
        assert outputs is not None, "streams have ended"
        for output in outputs.outputs:
            if output.finished:
                self._add(self._stream_tokens)

    def begin_trace(self, ending: str) -> None:
        before = set(threading.enumerate())
        self._switch(True, f"trace{ending}")
        self._writer = next(t for t in threading.enumerate() if t not in before and t.name == "trace-writer")

    def end_trace(self) -> int:
        """Ends the trace and deletes it; returns the number of dropped events."""
        self._writer = None
        state = self._switch(False)
        for path in self._traces.iterdir():
            path.unlink()
        return state.dropped

    def writer_s(self) -> float:
        """Returns the processor time that the trace's thread has used."""
        if self._writer is None or self._writer.ident is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._writer.ident))

    def close(self) -> None:
        self._core.close()

    def _switch(self, enabled: bool, name: str | None = None) -> TraceState:
        """Switches the trace; returns its state when files are open, or complete."""
        state = self._core.call_utility("switch_trace", [enabled, name])
        while isinstance(state, TraceState) and state.state in ("opening", "closing"):
            time.sleep(POLL_S)
            state = self._core.call_utility("trace_state", [])
        assert isinstance(state, TraceState), state
        assert state.state == ("on" if enabled else "off"), state.error
        return state

    def _add(self, num_tokens: int) -> None:
        tokens = self._random.choices(range(self._core.ready.vocab_size), k=PROMPT_TOKENS)
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        name = f"stream-{next(self._ids)}"
        self._core.add_request(EngineCoreRequest(name, tokens, params, self._core.now(), job=JobRef()))


def measure(lanes: Sequence[Lane], rounds: int) -> dict[str, Costs]:
    """Runs every engine in every step, and in every part in every round."""
    chance = random.Random(0)
    found = {part: Costs() for part in ENDINGS}
    for number in range(rounds):
        for costs in found.values():
            costs.wall_s += [0.0] * BLOCKS_PER_TURN
            costs.cpu_s += [0.0] * BLOCKS_PER_TURN
        for turn in range(len(lanes)):
            cast = {part: lanes[(turn + place) % len(lanes)] for place, part in enumerate(ENDINGS)}
            _take_turn(cast, found, chance)
        say(f"round {number + 1} of {rounds}")
    return found


def _take_turn(cast: dict[str, Lane], found: dict[str, Costs], chance: random.Random) -> None:
    """Runs a turn with fixed parts; adds the costs to the samples of this round."""
    traced = {part: ending for part, ending in ENDINGS.items() if ending is not None}
    for part, ending in traced.items():
        cast[part].begin_trace(ending)
    for block in range(-WARM_UP_BLOCKS, BLOCKS_PER_TURN):
        for part, (wall_s, cpu_s) in _run_block(cast, chance).items():
            if block >= 0:
                found[part].wall_s[block - BLOCKS_PER_TURN] += wall_s
                found[part].cpu_s[block - BLOCKS_PER_TURN] += cpu_s
    for part, lane in cast.items():
        began_s = lane.writer_s()
        for _ in range(SOLO_STEPS):
            lane.step()
        found[part].writer_s += lane.writer_s() - began_s
        found[part].num_solo_steps += SOLO_STEPS
    for part in traced:
        found[part].num_dropped += cast[part].end_trace()


def _run_block(cast: dict[str, Lane], chance: random.Random) -> dict[str, tuple[float, float]]:
    """Returns the seconds of the steps and of their thread, for each part."""
    wall_s = dict.fromkeys(cast, 0.0)
    cpu_s = dict.fromkeys(cast, 0.0)
    for _ in range(STEPS_PER_BLOCK):
        for part in chance.sample(list(cast), len(cast)):
            began = time.perf_counter()
            began_cpu = time.thread_time()
            cast[part].step()
            wall_s[part] += time.perf_counter() - began
            cpu_s[part] += time.thread_time() - began_cpu
    return {part: (wall_s[part], cpu_s[part]) for part in cast}


def report(found: dict[str, Costs]) -> str:
    """Compares each part with "off", sample by sample."""
    off = found[OFF]
    steps = len(ENDINGS) * STEPS_PER_BLOCK
    lines = [
        f"What is left of the throughput without a trace, by {len(off.wall_s)} samples of {steps} steps",
        "(geometric mean, 95 % interval; off again against off is the noise)",
        "",
        f"  {'':<16} {'µs a step':>10} {'writer':>7}   {'a core to spare':<28}{'on one core':<28}core time",
    ]
    lines += [_line(part, off, costs) for part, costs in found.items()]
    lines += ["", *_verdicts(found)]
    lines.append(f"  {sum(costs.num_dropped for costs in found.values()):,} events dropped")
    return "\n".join(lines)


def _line(part: str, off: Costs, costs: Costs) -> str:
    steps = STEPS_PER_BLOCK * len(ENDINGS)
    mean_us, writer_us = (
        1e6 * cost / steps for cost in (statistics.fmean(costs.wall_s), costs.writer_s_per_sample)
    )
    line = f"  {part:<16} {mean_us:>10,.0f} {writer_us:>7,.0f}"
    if costs is off:
        return line
    left = (
        _left(off.wall_s, costs.wall_s),
        _left(off.wall_s, _with_writer(costs.wall_s, costs)),
        _left(off.cpu_s, _with_writer(costs.cpu_s, costs)),
    )
    return f"{line}   {told(left[0]):<28}{told(left[1]):<28}{told(left[2])}"


def _verdicts(found: dict[str, Costs]) -> Iterator[str]:
    """Yields verdicts for the worst case: a single core, so that the writer's work delays the steps."""
    off = found[OFF]
    for part in (ON, COMPRESSED):
        costs = found[part]
        yield f"  {part}: throughput {verdict(_left(off.wall_s, _with_writer(costs.wall_s, costs)))}"


def _with_writer(steps_s: Sequence[float], costs: Costs) -> list[float]:
    return [sample_s + costs.writer_s_per_sample for sample_s in steps_s]


def _left(off_s: Sequence[float], costs_s: Sequence[float]) -> Estimate:
    """Returns the throughput with these costs over that without a trace."""
    estimate = ratio_interval(list(zip(costs_s, off_s, strict=True)))
    assert estimate is not None, "a sample without a step"
    return estimate


def run(model: str, folder: Path, args: argparse.Namespace) -> str:
    with ExitStack() as stack:
        lanes = [
            stack.enter_context(closing(Lane(model, folder / str(number), args.streams, args.tokens)))
            for number in range(len(ENDINGS))
        ]
        return report(measure(lanes, args.rounds))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make bench-trace", description=__doc__)
    parser.add_argument(
        "--model",
        default=str(box_folder()),
        metavar="FOLDER",
        help=f"what runs (the bundled model); '{NO_MODEL}' is one that is made for it and costs next to "
        "nothing: nearly all is the engine's own work then",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help=f"of {BLOCKS_PER_TURN} samples of {len(ENDINGS) * STEPS_PER_BLOCK} steps of each part (5)",
    )
    parser.add_argument("--streams", type=int, default=32, metavar="STREAMS", help="at once (32)")
    parser.add_argument("--tokens", type=int, default=200, metavar="TOKENS", help="of each stream (200)")
    args = parser.parse_args(argv)
    if min(args.rounds, args.streams, args.tokens) < 1:
        parser.error("--rounds, --streams and --tokens must be at least 1")
    with (
        unwound_by_sigterm(),
        tempfile.TemporaryDirectory(prefix="trace-steps-") as name,
        threadpool_limits(1),  # a step on one core: the writer uses the others
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

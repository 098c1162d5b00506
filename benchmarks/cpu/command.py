"""``make bench-cpu``: measures our server on CPUs, over HTTP, with models of random weights, made when
needed: `tiny` (14 million parameters: the engine's own work) and `small` (the dimensions of Qwen3-0.6B:
arithmetic).

Requests are greedy unless stated, their prompts random token ids, their lengths exact. With --peers other
servers get the same requests, in turns within each round, and the table shows ours / theirs next to their
figures.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cpu.cases import FULL, GROUPS, MEMORY, QUICK, Figure
from benchmarks.cpu.contender import OURS, Peer, ours, read_peers
from benchmarks.cpu.goals import GOALS, Goal, memory_goal
from benchmarks.cpu.match import Match, Measured, Plan
from benchmarks.cpu.models import MODELS, TINY, USUAL, BenchModel, weight_bytes
from benchmarks.cpu.record import begin_record, record_of, write_record
from benchmarks.cpu.table import Row, table
from engine.errors import EngineError
from eval.arguments import count
from eval.load.server_process import unwound_by_sigterm
from eval.report.results import require_writable

FOLDER = Path("out/cpu-bench")
NUM_ROUNDS = 5
EPILOG = """
The cases, each in every round:

  decode    1, 8 and 32 requests at once, prompts of 128 tokens: 128 tokens each less the time of one token
  sampled   32 requests at once that sample, beside 32 greedy ones
  prefill   4 prompts of 2048 tokens at once, and one alone, a token each
  prefix    a turn of 4096 tokens; the next with 64 more; a prompt as long as that, never seen
  http      completions of one token for 16, by 1 and by 32 callers
  start     from the command to the first answer; restarted for each round
  memory    what all processes of the server hold when the round is over, and held at most

A file for --peers (TOML, or JSON of the same shape):

  [[peers]]
  name = "vLLM"
  command = "/envs/vllm/bin/python -m vllm.entrypoints.openai.api_server --model {model} --port {port}"
  ready_path = "/health"            # optional: must answer 200 before a completion is tried
  start_timeout_s = 600             # 300
  environment = { VLLM_CPU_KVCACHE_SPACE = "4" }
  cases = ["decode", "prefill"]     # all by default

  [[peers]]
  name = "llama.cpp"
  command = "llama-server -m {model} --port {port} -t 2 -np 32 -c 16384"
  models = { tiny = "tiny.gguf" }   # what {model} is where it is not our folder
  base_url = "http://127.0.0.1:{port}/v1"   # the default
  model_name = "{model}"            # what requests call the model; the default

A server with another configuration of our own is a peer like any other:
  command = "python -m continuum.cli serve {model} --port {port} --max-model-len 8192"
"""


@dataclass(frozen=True, slots=True)
class Bench:
    """The options of a run."""

    plan: Plan
    models: Sequence[BenchModel]
    peers: Sequence[Peer]
    folder: Path
    """Folder of the models and the logs."""
    show_goals: bool

    def match(self, model: BenchModel) -> Measured:
        folder = model.folder(self.folder / "models")
        contenders = [ours(model, folder), *[peer.contender(model.name, folder) for peer in self.peers]]
        return asyncio.run(Match(model.name, self.plan, contenders, self.folder / "logs" / model.name).play())

    def rows(self, model: BenchModel, measured: Measured) -> list[Row]:
        figures = dict.fromkeys(figure for each in measured.readings.values() for figure in each)
        return [
            Row(
                figure,
                {name: each[figure] for name, each in measured.readings.items() if figure in each},
                self._goal(model, figure),
            )
            for figure in figures
        ]

    def _goal(self, model: BenchModel, figure: Figure) -> Goal | None:
        if not self.show_goals:
            return None
        if figure is MEMORY:
            return memory_goal(weight_bytes(model.folder(self.folder / "models")), model.kv_bytes)
        return GOALS.get((model.name, figure.key))


def run(bench: Bench, command: str, out: Path | None) -> bool:
    """Prints a table per model as soon as it is done; returns whether all our own figures were measured."""
    record = begin_record(bench.plan, command)
    ours_failed = False
    for model in bench.models:
        measured = bench.match(model)
        size = weight_bytes(model.folder(bench.folder / "models"))
        others = [name for name in measured.readings if name != OURS]
        print(_title(model, size, bench.plan.num_rounds), end="\n\n")
        print(table(bench.rows(model, measured), others), end="\n\n")
        print("".join(f"{sentence}\n" for sentence in measured.failures), end="", flush=True)
        record.models.append(record_of(model.name, size, model.kv_bytes, measured))
        if out is not None:
            write_record(out, record)
        ours_failed |= measured.ours_failed
    return not ours_failed


def _title(model: BenchModel, size: int, num_rounds: int) -> str:
    return (
        f"{model.name}: {size / 1e6:,.0f} MB of weights in bfloat16, our KV pool "
        f"{model.kv_bytes / 1e6:,.0f} MB; median (lowest to highest) of {num_rounds} rounds"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns exit code 1 if one of our own figures cannot be measured."""
    given = _parser().parse_args(argv)
    command = shlex.join(["python", "-m", "benchmarks.cpu", *(sys.argv[1:] if argv is None else argv)])
    try:
        require_writable(given.json)
        with unwound_by_sigterm():
            return 0 if run(_bench(given), command, given.json) else 1
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make bench-cpu",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--cases",
        nargs="+",
        choices=GROUPS,
        default=GROUPS,
        metavar="CASE",
        help=f"of {', '.join(GROUPS)}; all",
    )
    add("--models", nargs="+", choices=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}; the first two")
    add(
        "--repeats",
        type=count,
        metavar="N",
        help=f"rounds, each with all cases of all servers ({NUM_ROUNDS})",
    )
    add("--quick", action="store_true", help="tiny, a round of few tokens: whether all works, no figures")
    add("--peers", type=Path, metavar="FILE", help="other servers; of a folder its peers.toml. See below")
    add("--json", type=Path, metavar="OUT", help="write every value of every round there")
    add("--folder", type=Path, default=FOLDER, metavar="FOLDER", help=f"for models and logs ({FOLDER})")
    return parser


def _bench(given: argparse.Namespace) -> Bench:
    names = given.models or ([TINY.name] if given.quick else [model.name for model in USUAL])
    plan = Plan(
        cases=QUICK if given.quick else FULL,
        groups=frozenset(given.cases),
        num_rounds=given.repeats or (1 if given.quick else NUM_ROUNDS),
        # A new seed each time: a server with a cache on disk has met none of its prompts.
        seed=secrets.randbits(32),
    )
    peers = read_peers(given.peers) if given.peers is not None else []
    return Bench(
        plan, [MODELS[name] for name in dict.fromkeys(names)], peers, given.folder, show_goals=not given.quick
    )

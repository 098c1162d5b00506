"""``continuum fit``: how many agents a model and a GPU serve, with which waits, and how to serve them."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

import msgspec

from eval.arguments import count, positive, share
from eval.errors import UsageError
from eval.fit.agents import AgentsAtSlo, agents_at_slo
from eval.fit.memory import Memory, memory_of
from eval.report.metrics import TTFT_LIMIT_S
from eval.sim.agents import MAX_AGENTS
from eval.sim.hardware import GIB, GPUS
from eval.sim.models import MODELS
from eval.sim.simulate import Hardware

DEFAULT_CONTEXT = 32_768
DEFAULT_POLICY = "continuum"


class Fit(msgspec.Struct, kw_only=True):
    """What the command reports, as ``--json`` prints it."""

    memory: Memory
    at_slo: AgentsAtSlo | None
    """None without ``--workload``."""
    command: str
    """The server's command line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of ``continuum fit``."""
    parser.usage = "continuum fit MODEL [--gpu NAME] [--context TOKENS] [--workload FILE]"
    add = parser.add_argument
    add("model", metavar="MODEL", help=f"Model folder, or a preset: {', '.join(MODELS)}")
    add("--gpu", default="h100", metavar="NAME", help=f"GPU preset: {', '.join(GPUS)}")
    add(
        "--tensor-parallel",
        type=count,
        metavar="N",
        help="GPUs that share the model (default: the fewest whose memory holds weights and KV)",
    )
    add("--gpu-memory-utilization", type=share, default=0.92, metavar="X", help="Fraction of the GPU memory")
    add(
        "--context",
        type=count,
        default=DEFAULT_CONTEXT,
        metavar="TOKENS",
        help="Context of an agent, prompt plus output, in tokens",
    )
    add(
        "--agents",
        type=count,
        metavar="N",
        help="Agents to serve at once; adds the host memory that their KV needs (default: those that fit)",
    )
    add(
        "--workload",
        metavar="FILE",
        help="Simulate jobs of this workload to find how many agents meet the SLO; see continuum workload",
    )
    add(
        "--slo-return-s",
        type=positive,
        default=2.0,
        metavar="S",
        help="SLO: 95 of 100 returning turns have their first token within S seconds, and 95 of 100 first "
        f"turns within {TTFT_LIMIT_S:g}",
    )
    add(
        "--jobs-per-agent",
        type=count,
        default=3,
        metavar="N",
        help="Jobs that each agent runs in a simulation, one after another",
    )
    add("--policy", default=DEFAULT_POLICY, metavar="NAME", help="Scheduling policy that is simulated")
    add("--json", action="store_true", help="Print the result as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Runs ``continuum fit``. Raises one sentence for what is unknown or never fits."""
    hardware = Hardware(
        model=arguments.model,
        gpu=arguments.gpu,
        tensor_parallel=arguments.tensor_parallel,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
    )
    memory = memory_of(hardware, arguments.context, arguments.agents)
    at_slo = None
    if arguments.workload is not None:
        if memory.host_bytes and memory.state_bytes:
            raise UsageError("--agents beyond those that fit cannot be simulated for a model with states.")
        at_slo = agents_at_slo(
            hardware,
            arguments.workload,
            policy=arguments.policy,
            context=arguments.context,
            return_s=arguments.slo_return_s,
            first=max(1, memory.agents),
            jobs_per_agent=arguments.jobs_per_agent,
            host_kv_tokens=memory.host_bytes // memory.kv_bytes_per_token,
            progress=sys.stderr,
        )
    fit = Fit(memory=memory, at_slo=at_slo, command=serve_command(arguments, memory))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(fit)).decode())
    else:
        print(render(fit, arguments))
    return 0


def serve_command(arguments: argparse.Namespace, memory: Memory) -> str:
    """The command that serves this. A preset has no folder: its place is called MODEL."""
    name = str(Path(arguments.model).resolve()) if Path(arguments.model).is_dir() else "MODEL"
    words = ["continuum serve", shlex.quote(name), f"--max-model-len {arguments.context}"]
    if arguments.policy != DEFAULT_POLICY:
        words.append(f"--scheduling-policy {shlex.quote(arguments.policy)}")
    if memory.num_gpus > 1:
        words.append(f"--tensor-parallel-size {memory.num_gpus}")
    if arguments.gpu_memory_utilization != 0.92:
        words.append(f"--gpu-memory-utilization {arguments.gpu_memory_utilization:g}")
    if memory.host_bytes:
        words.append(f"--kv-offloading-size {-(-memory.host_bytes // GIB):.0f}")
    return " ".join(words)


def render(fit: Fit, arguments: argparse.Namespace) -> str:
    """The report in lines of a label and a value."""
    memory = fit.memory
    rows = [
        ("weights", _size(memory.weight_bytes)),
        ("KV of a token", _size(memory.kv_bytes_per_token)),
        *([("state of a sequence", _size(memory.state_bytes))] if memory.state_bytes else []),
        ("KV pool", f"{memory.kv_tokens:,} tokens"),
        (f"KV of an agent at {arguments.context:,} tokens", _size(memory.agent_bytes)),
        ("agents whose KV fits", f"{memory.agents:,}"),
    ]
    if memory.host_bytes:
        rows.append((f"host memory for {arguments.agents:,} agents", _size(memory.host_bytes)))
    lines = [memory.hardware, *_columns(rows)]
    if fit.at_slo is not None:
        lines += ["", *_simulated(fit.at_slo, arguments)]
    return "\n".join([*lines, "", fit.command])


def _simulated(at_slo: AgentsAtSlo, arguments: argparse.Namespace) -> list[str]:
    what = f"simulated, {arguments.policy}, {arguments.workload}: an agent starts its next job when one ends"
    slo = f"agents with p95 of returns within {arguments.slo_return_s:g} s"
    most = f"at least {MAX_AGENTS:,}" if at_slo.agents == MAX_AGENTS else f"{at_slo.agents:,}"
    rows = [(slo, most if at_slo.agents else "none")]
    rows += [
        (
            f"  {tried.agents:,} agents: p95 of returns, of first turns",
            f"{tried.return_p95_s:,.2f} s, {tried.first_p95_s:,.2f} s",
        )
        for tried in at_slo.tried
    ]
    return [what, *_columns(rows), *(f"- {note}" for note in at_slo.notes)]


def _size(num_bytes: int) -> str:
    units = (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10))
    unit, size = next((each for each in units if num_bytes >= each[1]), ("bytes", 1))
    return f"{num_bytes / size:,.1f} {unit}"


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in rows)
    return [f"{label:<{width}}  {value}" for label, value in rows]

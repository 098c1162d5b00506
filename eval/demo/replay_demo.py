"""The demo that replays synthetic or recorded jobs, under each policy, on a model of random weights.

Needs no network and no accelerator. Starts a server in a separate process for each policy.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from eval.demo.demo_server import BLOCK_SIZE, DemoServer
from eval.load.bench_run import BenchOptions, BenchRun, run_bench
from eval.load.planner import Limits
from eval.say import say
from eval.workloads.catalog import SYNTHETIC, RecordedWorkload, load_jobs
from eval.workloads.job import Job
from eval.workloads.synthetic import SyntheticConfig, make_jobs

MODEL_NAME = "demo"
TEMPLATE_TOKENS_PER_TURN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayDemo:
    """Sizes of a demo; the defaults take about two minutes on two cores."""

    out: Path = Path("out/demo")
    policies: tuple[str, ...] = ("fcfs", "continuum")
    workload: str = SYNTHETIC
    num_jobs: int = 16
    seed: int | None = None
    max_turns: int | None = None
    max_context_tokens: int = 4096
    pool_share: float = 0.33
    """KV pool as a share of the sum of all jobs' final contexts."""
    hidden_size: int = 256
    num_layers: int = 6
    max_num_batched_tokens: int = 1024
    time_scale: float = 1.0

    @property
    def limits(self) -> Limits:
        return Limits(
            max_turns=self.max_turns, max_context_tokens=self.max_context_tokens, time_scale=self.time_scale
        )


def quick(config: ReplayDemo) -> ReplayDemo:
    """Returns the sizes of a half-minute demo that only checks that everything works."""
    return replace(config, num_jobs=min(config.num_jobs, 6), max_turns=4, hidden_size=128, num_layers=3)


def run_replay_demo(config: ReplayDemo) -> list[BenchRun]:
    """Replays the jobs under each policy; writes model, traces, records and results to ``config.out``."""
    model = _make_model(config)
    jobs = _jobs(config)
    num_blocks = _pool_blocks(config, jobs, model)
    say(
        f"{len(jobs)} jobs at once, a KV pool of {num_blocks} blocks ({num_blocks * BLOCK_SIZE:,} tokens): "
        f"{config.pool_share:.0%} of the jobs' contexts at their ends"
    )
    server = DemoServer(
        model=model,
        name=MODEL_NAME,
        num_blocks=num_blocks,
        max_model_len=config.max_context_tokens,
        max_num_batched_tokens=config.max_num_batched_tokens,
        out=config.out,
    )
    return [server.run(policy, _work(config, jobs, policy)) for policy in config.policies]


def _make_model(config: ReplayDemo) -> Path:
    # Loads torch, which nothing else here needs.
    from engine.worker.loading.tiny_models import make_model_folder

    say(f"Making a model: {config.num_layers} layers of {config.hidden_size}, random weights")
    return make_model_folder(
        config.out / "model",
        family="qwen3",
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        vocab_size=2048,
        max_position_embeddings=config.max_context_tokens,
    )


def _jobs(config: ReplayDemo) -> list[Job]:
    if config.workload != SYNTHETIC:
        return load_jobs(config.workload, config.num_jobs, config.seed)
    return make_jobs(
        SyntheticConfig(
            num_jobs=config.num_jobs,
            seed=config.seed or 0,
            min_turns=6,
            max_turns=9,
            system_words=100,
            task_words=200,
            result_words=70,
            thought_words=3,
        )
    )


def _pool_blocks(config: ReplayDemo, jobs: list[Job], model: Path) -> int:
    """Returns blocks for the given share of all contexts, and at least for the longest one."""
    from tokenizers import Tokenizer  # A native library of 10 MB, for this one count.

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    system = num_tokens(jobs[0].system_text)
    own = [_context_tokens(job, config.limits, system, num_tokens) - system for job in jobs]
    wanted = config.pool_share * (system + sum(own))
    return math.ceil(max(wanted, 1.25 * config.max_context_tokens) / BLOCK_SIZE) + 1


def _context_tokens(job: Job, limits: Limits, system: int, num_tokens: Callable[[str], int]) -> int:
    """Returns the tokens of the job's final context, counting only the turns that are replayed."""
    context = system
    for turn in job.turns[: limits.max_turns]:
        longer = (
            context
            + num_tokens(turn.input_text or "")
            + num_tokens(turn.output_text or "")
            + TEMPLATE_TOKENS_PER_TURN
        )
        if limits.max_context_tokens is not None and longer > limits.max_context_tokens:
            break
        context = longer
    return context


def _work(config: ReplayDemo, jobs: list[Job], policy: str) -> Callable[[str, Path], BenchRun]:
    def work(base_url: str, folder: Path) -> BenchRun:
        options = BenchOptions(
            base_url=base_url,
            workload=RecordedWorkload(Path(config.workload).name, tuple(jobs)),
            name=policy,
            limits=config.limits,
            seed=config.seed or 0,
            records=folder / "records.jsonl",
        )
        return asyncio.run(run_bench(options))

    return work

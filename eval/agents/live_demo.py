"""The demo with live agents: the bundled model works on tasks, under each policy in turn.

Requests and tools are real, with recorded durations. KV memory holds only a part of the contexts.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eval.agent_model import MAX_REPLY_TOKENS, NAME, folder
from eval.agent_model.tasks import Task
from eval.agents.expression import evaluate_here
from eval.agents.live import LiveOptions, run_live
from eval.agents.live_tasks import live_tasks
from eval.agents.sandbox import folder_of
from eval.agents.tools import SCHEMAS, Toolbox
from eval.demo.demo_server import BLOCK_SIZE, DemoServer
from eval.errors import EvalError
from eval.load.bench_run import BenchRun
from eval.say import say

MIN_POOL_FACTOR = 1.25
"""Least ratio of the pool to the longest task's context; with less, the engine could not run the task."""
TEMPLATE_TOKENS_PER_MESSAGE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveDemo:
    """Sizes of a demo."""

    out: Path = Path("out/demo")
    policies: tuple[str, ...] = ("fcfs", "continuum")
    model: Path | None = None
    """Model folder; None: the bundled model."""
    num_tasks: int = 48
    agents: int = 24
    """Number of concurrent agents."""
    page_lines: int = 60
    """Lines of the page that each task reads early, about nine tokens each."""
    seed: int = 0
    pool_share: float = 0.33
    """KV pool as a share of the sum of all concurrent contexts at their longest."""
    max_num_batched_tokens: int = 1024
    time_scale: float = 1.0


def quick(config: LiveDemo) -> LiveDemo:
    """Returns the sizes of a half-minute demo that only checks that everything works."""
    return replace(config, num_tasks=min(config.num_tasks, 8), agents=min(config.agents, 8), time_scale=0.2)


def run_live_demo(config: LiveDemo) -> list[BenchRun]:
    """Runs the agents under each policy; writes traces, records and results to ``config.out``."""
    model = config.model or folder()
    tasks = live_tasks(config.num_tasks, config.seed, config.page_lines)
    num_blocks = _pool_blocks(config, tasks, model)
    say(
        f"{len(tasks)} tasks for {config.agents} agents at once, a KV pool of {num_blocks} blocks "
        f"({num_blocks * BLOCK_SIZE:,} tokens): {config.pool_share:.0%} of their longest contexts"
    )
    server = DemoServer(
        model=model,
        name=NAME,
        num_blocks=num_blocks,
        max_model_len=min(_longest_context(model), (num_blocks - 1) * BLOCK_SIZE),
        max_num_batched_tokens=config.max_num_batched_tokens,
        out=config.out,
    )
    return [server.run(policy, _work(config, tasks, policy)) for policy in config.policies]


def _pool_blocks(config: LiveDemo, tasks: Sequence[Task], model: Path) -> int:
    """Returns blocks for the given share of the agents' contexts, and at least for the longest one."""
    from tokenizers import Tokenizer  # A native library of 10 MB, for this one count.

    tokenizer = Tokenizer.from_str(_text(model / "tokenizer.json"))

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    shared = num_tokens(json.dumps(SCHEMAS))
    own = [_own_tokens(task, num_tokens) for task in tasks]
    wanted = config.pool_share * (shared + config.agents * sum(own) / len(own))
    return math.ceil(max(wanted, MIN_POOL_FACTOR * (shared + max(own)) + MAX_REPLY_TOKENS) / BLOCK_SIZE) + 1


def _own_tokens(task: Task, num_tokens: Callable[[str], int]) -> int:
    """Returns the tokens that a task adds to the shared prefix when it is solved in the fewest turns."""
    texts = [task.prompt, task.answer]
    with folder_of(task.files) as root:
        toolbox = Toolbox(root, evaluate=evaluate_here)
        for calls in task.rounds:
            for call in calls:
                arguments = json.dumps(dict(call.arguments))
                texts += [call.name + arguments, toolbox.run(call.name, arguments)]
    return sum(num_tokens(text) + TEMPLATE_TOKENS_PER_MESSAGE for text in texts)


def _work(config: LiveDemo, tasks: Sequence[Task], policy: str) -> Callable[[str, Path], BenchRun]:
    def work(base_url: str, folder: Path) -> BenchRun:
        options = LiveOptions(
            base_url=base_url,
            name=policy,
            tasks=tasks,
            concurrency=config.agents,
            seed=config.seed,
            time_scale=config.time_scale,
            records=folder / "records.jsonl",
        )
        return asyncio.run(run_live(options))

    return work


def _longest_context(model: Path) -> int:
    """Returns the model's context length in tokens."""
    config = json.loads(_text(model / "config.json"))
    return int(config["max_position_embeddings"])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvalError(f"{path.parent} is not a model folder: {path.name} cannot be read.") from error

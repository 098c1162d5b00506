"""The command line of an evaluation: its server and its output. The caller provides the tasks."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from eval.agents.evaluation import Evaluation, EvaluationOptions, Outcome, TaskResult, evaluate
from eval.agents.server import MODEL_NAME, served
from eval.agents.task import Task
from eval.arguments import amount, count
from eval.errors import EvalError
from eval.load.client import ServerClient
from eval.report.tables import aligned

_FAILURES = tuple(outcome for outcome in Outcome if outcome is not Outcome.SOLVED)
_HEADS = tuple(outcome.replace("_", " ") for outcome in _FAILURES)


def render(evaluation: Evaluation) -> str:
    """Returns a summary line, a table by kind of task, and a line for each unsolved task."""
    kinds = sorted({task.kind for task in evaluation.tasks})
    lines = [["kind", "tasks", "solved", "%", *_HEADS, "turns", "cached %"]]
    lines += [_row(kind, [task for task in evaluation.tasks if task.kind == kind]) for kind in kinds]
    if len(kinds) > 1:
        lines.append(_row("all", evaluation.tasks))
    unsolved = [_told(task) for task in evaluation.tasks if task.outcome is not Outcome.SOLVED]
    return "\n".join(
        [_sums(evaluation), "", *aligned(lines, gap="  "), *([""] if unsolved else []), *unsolved]
    )


def _sums(evaluation: Evaluation) -> str:
    num_calls = sum(task.num_calls for task in evaluation.tasks)
    drawn = "greedy" if not evaluation.temperature else f"temperature {evaluation.temperature:g}"
    solved = evaluation.count(Outcome.SOLVED)
    return (
        f"{evaluation.model}, {drawn}: {solved} of {len(evaluation.tasks)} tasks solved "
        f"({evaluation.solved_percent:.1f} %), {evaluation.num_unparsed} of {num_calls} calls unparsed, "
        f"{evaluation.count(Outcome.OVER_LIMIT)} over the turn limit, {evaluation.seconds:.0f} s"
    )


def _row(name: str, tasks: Sequence[TaskResult]) -> list[str]:
    solved = sum(task.outcome is Outcome.SOLVED for task in tasks)
    failures = [str(sum(task.outcome is failure for task in tasks)) for failure in _FAILURES]
    prompt_tokens = sum(task.prompt_tokens for task in tasks)
    cached = 100 * sum(task.cached_tokens for task in tasks) / prompt_tokens if prompt_tokens else 0.0
    turns = sum(task.num_turns for task in tasks) / len(tasks)
    percent = f"{100 * solved / len(tasks):.1f}"
    return [name, str(len(tasks)), str(solved), percent, *failures, f"{turns:.1f}", f"{cached:.0f}"]


def _told(task: TaskResult) -> str:
    said = task.error or task.answer or "no answer"
    first, *rest = said.strip().splitlines() or [""]
    return f"{task.task_id} ({task.kind}), {task.outcome}: {first[:80]}{' ...' if rest or first[80:] else ''}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of an evaluation; the caller adds those of its tasks."""
    add = parser.add_argument
    add("--base-url", metavar="URL", help="URL of a running server (default: start one for the model)")
    add("--model", metavar="NAME", help="Model folder to serve; with --base-url, the model's name there")
    add(
        "--concurrency",
        type=count,
        default=8,
        metavar="N",
        help="Number of concurrent tasks (default: %(default)s)",
    )
    add("--temperature", type=amount, default=0.0, metavar="X", help="Sampling temperature (default: greedy)")
    add(
        "--sampling-seed", type=int, default=0, metavar="K", help="Random seed of sampling with a temperature"
    )
    add(
        "--max-tokens",
        type=count,
        default=512,
        metavar="N",
        help="Maximum tokens per response (default: %(default)s)",
    )
    add("--api-key", metavar="KEY", help="API key of the server")
    add(
        "--json",
        type=Path,
        metavar="FILE",
        help="Write every task's result to this file, with transcripts of those not solved",
    )
    add(
        "--at-least",
        type=amount,
        default=0.0,
        metavar="PERCENT",
        help="Exit with code 1 if fewer tasks are solved",
    )


def run(arguments: argparse.Namespace, tasks: Sequence[Task], default_model: Path) -> int:
    """Evaluates and prints. Exit code 1 if fewer tasks are solved than ``--at-least``."""
    if not tasks:
        raise EvalError("There are no tasks.")
    with _server(arguments, default_model) as (base_url, model):
        options = EvaluationOptions(
            base_url=base_url,
            model=model,
            concurrency=arguments.concurrency,
            temperature=arguments.temperature,
            seed=arguments.sampling_seed,
            max_tokens=arguments.max_tokens,
            api_key=arguments.api_key,
        )
        evaluation = asyncio.run(evaluate(tasks, options))
    print(render(evaluation))
    if arguments.json is not None:
        _write(arguments.json, evaluation)
    return 0 if evaluation.solved_percent >= arguments.at_least else 1


@contextmanager
def _server(arguments: argparse.Namespace, default_model: Path) -> Iterator[tuple[str, str]]:
    """Yields address and model name of the given server, else of one started for the duration."""
    if arguments.base_url is None:
        with served(arguments.model or str(default_model)) as base_url:
            yield base_url, MODEL_NAME
    else:
        model = asyncio.run(_model_name(arguments.base_url, arguments.model, arguments.api_key))
        yield arguments.base_url, model


async def _model_name(base_url: str, model: str | None, api_key: str | None) -> str:
    async with ServerClient(base_url, model=model, api_key=api_key) as client:
        return (await client.connect()).model


def _write(path: Path, evaluation: Evaluation) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(evaluation), indent=1) + b"\n")
    except OSError as error:
        raise EvalError(f"Cannot write the evaluation {path}: {error.strerror}.") from error

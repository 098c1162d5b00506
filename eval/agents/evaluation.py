"""Runs an agent on many tasks at once, through the OpenAI client; each task's own checker scores it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from eval.agents.agent import Agent, AgentRun, Ending
from eval.agents.model import ModelReply, Sampling
from eval.agents.openai_model import OpenAIModel, open_client
from eval.agents.sandbox import folder_of
from eval.agents.task import Task
from eval.agents.tools import Toolbox
from eval.errors import EvalError

CALL_MARK = "<tool_call"
"""Marks, in the text of a response, a call that the server could not parse."""
PROGRESS_S = 3.0


class Outcome(StrEnum):
    """How a task ended."""

    SOLVED = "solved"
    WRONG = "wrong"
    """The checker rejected the answer."""
    UNPARSED = "unparsed"
    """The checker rejected the answer, and a call of the task could not be parsed."""
    OVER_LIMIT = "over_limit"
    """The task took more turns than it allows."""
    FAILED = "failed"
    """A request failed."""


class TaskResult(msgspec.Struct, kw_only=True):
    """One task, from its prompt to its check."""

    task_id: str
    kind: str
    outcome: Outcome
    answer: str
    error: str | None
    num_turns: int
    max_turns: int
    num_calls: int
    num_unparsed: int
    """Number of calls that the server could not parse, or whose arguments are not a JSON object."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    transcript: list[str] = []
    """Calls and results of a task that was not solved."""


class Evaluation(msgspec.Struct, kw_only=True):
    """All tasks of one run."""

    model: str
    temperature: float
    seed: int
    seconds: float
    tasks: list[TaskResult]

    def count(self, outcome: Outcome) -> int:
        return sum(task.outcome is outcome for task in self.tasks)

    @property
    def solved_percent(self) -> float:
        return 100 * self.count(Outcome.SOLVED) / len(self.tasks)

    @property
    def num_unparsed(self) -> int:
        return sum(task.num_unparsed for task in self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """The server and the sampling options."""

    base_url: str
    model: str
    concurrency: int = 8
    temperature: float = 0.0
    seed: int = 0
    """Random seed, combined with the number of each task."""
    max_tokens: int = 512
    """Maximum tokens per response."""
    api_key: str | None = None


async def evaluate(tasks: Sequence[Task], options: EvaluationOptions) -> Evaluation:
    """Runs the agent on all tasks, each in a separate folder. Raises ServerGoneError."""
    started = time.perf_counter()
    slots = asyncio.Semaphore(options.concurrency)
    progress = _Progress(len(tasks))
    async with open_client(options.base_url, options.api_key) as client:

        async def solve(number: int, task: Task) -> TaskResult:
            async with slots:
                sampling = Sampling(
                    temperature=options.temperature,
                    seed=options.seed + number,
                    max_tokens=options.max_tokens,
                )
                result = await _solve(task, OpenAIModel(client, options.model, sampling))
            progress.add(result)
            return result

        try:
            async with asyncio.TaskGroup() as group:
                running = [group.create_task(solve(number, task)) for number, task in enumerate(tasks)]
        except* EvalError as errors:
            raise _first(errors) from None
    return Evaluation(
        model=options.model,
        temperature=options.temperature,
        seed=options.seed,
        seconds=time.perf_counter() - started,
        tasks=[task.result() for task in running],
    )


async def _solve(task: Task, model: OpenAIModel) -> TaskResult:
    with folder_of(task.files) as root:
        run = await Agent(model=model, tools=Toolbox(root), max_turns=task.max_turns).ask(task.prompt)
        solved = run.ending is Ending.ANSWERED and task.check(run.answer, root)
    replies = [turn.reply for turn in run.turns]
    num_unparsed = sum(unparsed_calls(reply) for reply in replies)
    outcome = Outcome.SOLVED if solved else _why_not(run, num_unparsed)
    return TaskResult(
        task_id=task.task_id,
        kind=task.kind,
        outcome=outcome,
        answer=run.answer,
        error=run.error,
        num_turns=len(run.turns),
        max_turns=task.max_turns,
        num_calls=sum(len(reply.calls) for reply in replies),
        num_unparsed=num_unparsed,
        prompt_tokens=sum(reply.prompt_tokens for reply in replies),
        cached_tokens=sum(reply.cached_tokens or 0 for reply in replies),
        output_tokens=sum(reply.output_tokens for reply in replies),
        seconds=run.seconds,
        transcript=[] if solved else _transcript(task, run),
    )


def _why_not(run: AgentRun, num_unparsed: int) -> Outcome:
    if run.ending is Ending.FAILED:
        return Outcome.FAILED
    if run.ending is Ending.OVER_LIMIT:
        return Outcome.OVER_LIMIT
    return Outcome.UNPARSED if num_unparsed else Outcome.WRONG


def unparsed_calls(reply: ModelReply) -> int:
    """Number of calls in a response that are not well-formed."""
    return reply.text.count(CALL_MARK) + sum(not _is_object(call.arguments) for call in reply.calls)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _transcript(task: Task, run: AgentRun) -> list[str]:
    lines = [f"task: {task.prompt}"]
    for turn in run.turns:
        if turn.reply.text:
            lines.append(f"said: {turn.reply.text}")
        lines += [f"call: {call.name} {call.arguments}" for call in turn.reply.calls]
        lines += [f"result: {result.result}" for result in turn.results]
    return lines


def _first(errors: BaseExceptionGroup[EvalError]) -> EvalError:
    """Returns one of the errors; all say the same."""
    inner = errors.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


@dataclass(slots=True)
class _Progress:
    """Prints a progress line every few seconds; in place on a terminal."""

    num_tasks: int
    done: int = 0
    solved: int = 0
    started: float = field(default_factory=time.monotonic)
    said: float = 0.0

    def add(self, result: TaskResult) -> None:
        self.done += 1
        self.solved += result.outcome is Outcome.SOLVED
        is_last = self.done == self.num_tasks
        now = time.monotonic()
        if not is_last and now - self.said < PROGRESS_S:
            return
        self.said = now
        line = f"{now - self.started:4.0f} s  tasks {self.done}/{self.num_tasks}  solved {self.solved}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{line}\x1b[K" + ("\n" if is_last else ""))
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()

"""Tasks for a demo: several turns each, with a long page read early that stays in the context."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from eval.agent_model.drawing import draw_tasks
from eval.agent_model.names import Names
from eval.agent_model.tasks import Task

MIN_ROUNDS = 3
"""Least rounds of calls of a task."""
READ = "read_file"
PAGE_SUFFIXES = (".txt", ".md", ".log", ".csv", ".py")
"""Suffixes of files that lines can be added to; a configuration file must stay valid."""
MAX_WORDS_OF_LINE = 4


def live_tasks(count: int, seed: int, page_lines: int) -> list[Task]:
    """Makes ``count`` tasks whose first file is ``page_lines`` longer. Equal seeds give equal tasks."""
    return list(islice(_with_pages(seed, page_lines), count))


def _with_pages(seed: int, page_lines: int) -> Iterator[Task]:
    for task in draw_tasks(seed):
        page = _page_of(task)
        if len(task.rounds) >= MIN_ROUNDS and page is not None:
            rng = random.Random(f"{seed} page of {task.task_id}")
            lines = _put_among(rng, task.files[page].splitlines(), _filler(rng, task, page_lines))
            yield replace(task, files={**task.files, page: "\n".join(lines) + "\n"})


def _page_of(task: Task) -> str | None:
    """Returns the first file that the task's solution reads, if lines can be added to it."""
    read = (call.arguments["path"] for calls in task.rounds for call in calls if call.name == READ)
    return next((path for path in read if path in task.files and path.endswith(PAGE_SUFFIXES)), None)


def _filler(rng: random.Random, task: Task, count: int) -> list[str]:
    """Returns lines of words that do not occur in the task."""
    names = Names(rng, held_out=True)
    known = " ".join((task.prompt, *task.files, *task.files.values()))
    lines: list[str] = []
    while len(lines) < count:
        words = [names.word() for _ in range(rng.randint(2, MAX_WORDS_OF_LINE))]
        if not any(word in known for word in words):
            lines.append(" ".join(words))
    return lines


def _put_among(rng: random.Random, lines: list[str], others: list[str]) -> list[str]:
    """Mixes both lists and keeps the order of each."""
    places = set(rng.sample(range(len(lines) + len(others)), len(lines)))
    own = iter(lines)
    other = iter(others)
    return [next(own if place in places else other) for place in range(len(lines) + len(others))]

"""The tasks of the bundled model: solvable with the real tools, checked by a program, with unseen names."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from eval.agent_model.drawing import draw_tasks, make_task
from eval.agent_model.kinds import KINDS, Kind
from eval.agent_model.names import Names, is_held_out
from eval.agent_model.tasks import SPARE_TURNS, Task
from eval.agent_model.world import World
from eval.agents.expression import evaluate_here
from eval.agents.sandbox import folder_of
from eval.agents.tools import Toolbox


def solve(task: Task, root: Path) -> list[str]:
    """Runs the calls of a task; returns their results."""
    tools = Toolbox(root, evaluate=evaluate_here)
    return [tools.run(c.name, json.dumps(dict(c.arguments))) for calls in task.rounds for c in calls]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_a_task_expects_comes_out_of_the_real_tools(kind: Kind) -> None:
    """Everything expected is in the question or in a result, and the check accepts the answer."""
    for seed in range(8):
        rng = random.Random(seed)
        task = make_task(kind, World(rng, Names(rng, held_out=True)), "one")
        with folder_of(task.files) as root:
            results = solve(task, root)
            assert task.check(task.answer, root)
            assert task.check(f" {task.answer}\n", root)
            told = " ".join([task.prompt, *results, "No file mentions", "outside the folder", "lines"])
            assert all(word.strip(".,") in told for word in task.expected.split())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_wrong_answer_or_work_not_done_is_no_solution(kind: Kind) -> None:
    rng = random.Random(1)
    task = make_task(kind, World(rng, Names(rng, held_out=True)), "one")
    with folder_of(task.files) as root:
        if task.written:
            assert not task.check(task.answer, root)
        solve(task, root)
        for answer in (
            "",
            "I do not know.",
            f"{task.answer} Or not",
            task.answer.replace(task.expected, "77"),
        ):
            assert not task.check(answer, root)
        assert not task.check(task.answer.replace(task.expected, f"x{task.expected}"), root)


def test_each_call_needs_what_earlier_ones_found() -> None:
    """In a chain the question contains no path but the first."""
    chains = [task for task in islice(draw_tasks(3), 200) if task.kind == "follow"]
    assert chains
    for task in chains:
        paths = [calls[0].arguments["path"] for calls in task.rounds]
        assert paths[0] in task.prompt
        assert not any(path in task.prompt for path in paths[1:])


def test_tasks_take_from_two_to_twelve_turns_with_parallel_calls_and_errors_among_them() -> None:
    tasks = list(islice(draw_tasks(0), 500))
    turns = Counter(len(task.rounds) + 1 for task in tasks)
    assert min(turns) == 2
    assert max(turns) == 12
    assert all(task.max_turns == len(task.rounds) + 1 + SPARE_TURNS for task in tasks)
    assert sum(any(len(calls) > 1 for calls in task.rounds) for task in tasks) > 100
    assert {task.kind for task in tasks} == {kind.__name__ for kind in KINDS}


def test_evaluation_uses_no_name_and_no_large_number_of_training() -> None:
    for held_out in (True, False):
        rng = random.Random(5)
        names = Names(rng, held_out)
        assert all(is_held_out(names.word()) is held_out for _ in range(500))
        assert all(is_held_out(str(names.number(100, 99999))) is held_out for _ in range(500))


def test_the_same_seed_draws_the_same_tasks_and_another_draws_others() -> None:
    first, again, other = (list(islice(draw_tasks(seed), 20)) for seed in (1, 1, 2))
    assert first == again
    assert not {task.prompt for task in first} & {task.prompt for task in other}

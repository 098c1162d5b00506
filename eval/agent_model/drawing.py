"""Draws tasks; equal seeds give equal tasks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

from eval.agent_model.kinds import KINDS, Kind
from eval.agent_model.names import Names
from eval.agent_model.tasks import Task
from eval.agent_model.world import World


def pick_kind(rng: random.Random, shares: Mapping[Kind, float] = KINDS) -> Kind:
    """Draws a kind of task, longer ones more often."""
    (kind,) = rng.choices(list(shares), list(shares.values()))
    return kind


def make_task(kind: Kind, world: World, task_id: str) -> Task:
    """Makes a task in a world, which may already have files of other tasks."""
    plan = kind(world)
    return Task(
        task_id=task_id,
        kind=kind.__name__,
        prompt=plan.prompt,
        files=dict(world.files),
        rounds=tuple(tuple(calls) for calls in plan.rounds),
        answer=plan.answer,
        expected=plan.expected,
        written=plan.written,
    )


def draw_tasks(seed: int, held_out: bool = True) -> Iterator[Task]:
    """Yields tasks without end, each in a separate world; equal seeds give equal tasks."""
    rng = random.Random(f"{seed} {'held out' if held_out else 'training'}")
    number = 0
    while True:
        world = World(rng, Names(rng, held_out))
        kind = pick_kind(rng)
        yield make_task(kind, world, f"{kind.__name__}-{number}")
        number += 1

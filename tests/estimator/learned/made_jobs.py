"""Synthetic jobs: one that begins with a long prompt and calls ``Edit`` has much work."""

from __future__ import annotations

import random

from estimator.learned.job_history import PastJob, TurnFacts

LONG, SHORT = "Edit", "Read"


def made_job(number: int, tool: str) -> PastJob:
    rng = random.Random(f"{tool} {number}")
    num_turns = rng.randint(18, 30) if tool == LONG else rng.randint(2, 5)
    turns, known = [], 0
    num_new = rng.randint(2000, 2500) if tool == LONG else rng.randint(300, 600)
    for _ in range(num_turns):
        num_output = rng.randint(50, 150)
        turns.append(TurnFacts(known + num_new, num_new, num_output, rng.random(), (tool,)))
        known, num_new = known + num_new + num_output, rng.randint(100, 400)
    return PastJob(f"{tool} {number}", tuple(turns))


def made_jobs(num_each: int) -> list[PastJob]:
    return [made_job(number, tool) for number in range(num_each) for tool in (LONG, SHORT)]

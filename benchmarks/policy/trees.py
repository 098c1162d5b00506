"""``python -m benchmarks.policy.trees --jobs 40 --seed 1 > trees.jsonl``: agents that start sub-agents, which
start their own, as a workload for ``continuum simulate --tell-parents``.

Each job has four to nine turns. One turn in its middle starts two to four sub-agents and waits for all of
them, down to the second generation. Sizes and tool times are drawn; no recording has such trees.
"""

from __future__ import annotations

import argparse
import json
from random import Random
from typing import Any

Record = dict[str, Any]
GENERATIONS = 2


class Trees:
    """Draws jobs, each root before its sub-agents."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.records: list[Record] = []

    def grow(self, job_id: str, parent: str | None, generation: int, num_tokens: int) -> None:
        """Draws a job whose first prompt has so many tokens, and the jobs below it."""
        random = self._random
        num_turns = random.randrange(4, 9) if generation else random.randrange(5, 10)
        spawns = random.sample(range(1, num_turns - 1), 1) if generation < GENERATIONS else []
        turns: list[Record] = []
        children: list[str] = []
        before = 0
        for number in range(num_turns):
            turn = self._turn(num_tokens, before, is_last=number == num_turns - 1)
            if number in spawns:
                started = [f"{job_id}/{number}-{each}" for each in range(random.randrange(2, 5))]
                turn |= {"spawns": started, "tool": "Task", "tool_s": 0.1}
                children += started
            turns.append(turn)
            before = num_tokens
            num_tokens += turn["output_tokens"] + random.randrange(200, 2500)
        self.records.append(_job(job_id, parent, turns))
        for child in children:
            self.grow(child, job_id, generation + 1, random.randrange(4000, 9000))

    def root(self, number: int) -> None:
        self.grow(f"t{number}", None, 0, self._random.randrange(8000, 20_000))

    def _turn(self, num_tokens: int, before: int, *, is_last: bool) -> Record:
        num_output = self._random.randrange(80, 300)
        tool_s = round(self._random.lognormvariate(1.0, 0.9), 2)
        return {
            "input_tokens": num_tokens,
            "prefix_tokens": before,
            "new_input_tokens": num_tokens - before,
            "output_tokens": num_output,
            "tool": None if is_last else "unnamed",
            "tool_s": None if is_last else tool_s,
            "gap_kind": "end" if is_last else "tool",
        }


def _job(job_id: str, parent: str | None, turns: list[Record]) -> Record:
    return {
        "job_id": job_id,
        "source": "trees",
        "group": job_id.partition("/")[0],
        "arrival_s": None,
        "block_size": 64,
        "tool_prompt_tokens": 0,
        "system_prompt_tokens": 2000,
        "parent_job": parent,
        "turns": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=40, help="jobs that no other job starts (default: 40)")
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    args = parser.parse_args()
    trees = Trees(args.seed)
    for number in range(args.jobs):
        trees.root(number)
    for record in trees.records:
        print(json.dumps(record))


if __name__ == "__main__":
    main()

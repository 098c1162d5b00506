"""Measures what recorded jobs leave behind, by the policy's rule, and how much of it they request again.

``python -m tests.continuum.superseded_recorded FILE`` prints it for a file of jobs with block hashes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from continuum.config import ContinuumConfig
from continuum.policy import ContinuumPolicy
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.policy import PinEnd, PolicyContext
from engine.records.messages import JobRef, ToolCall, ToolGapStarted
from eval.sim.block_chains import BlockNames, JobChain
from eval.sim.sim_request import SimRequest
from eval.workloads.catalog import load_jobs
from eval.workloads.job import GapKind, Job, Turn

BLOCK_SIZE = 64
TURN_S = 10.0
"""From a turn's arrival to its end, for any turn."""
MAX_GAP_S = 600.0


@dataclass(slots=True)
class Superseded:
    """Counts over all jobs; blocks are of 64 tokens."""

    num_turns: int = 0
    num_superseding: int = 0
    """Turns that superseded some of their job's blocks."""
    num_blocks: int = 0
    """Distinct blocks of all prompts and answers."""
    num_dead_blocks: int = 0
    """Blocks that were released."""
    num_asked_again: int = 0
    """Released blocks that were part of a later prompt of the job."""

    def add(self, other: Superseded) -> None:
        self.num_turns += other.num_turns
        self.num_superseding += other.num_superseding
        self.num_blocks += other.num_blocks
        self.num_dead_blocks += other.num_dead_blocks
        self.num_asked_again += other.num_asked_again


def superseded_in(jobs: Iterable[Job]) -> Superseded:
    """Plays each job alone, one turn after the other, as its client sends them."""
    total = Superseded()
    for job in jobs:
        total.add(_Player(job).play())
    return total


class _Player:
    """Plays one job against its own policy, without a scheduler: every pin is held and memory is
    unlimited."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._policy = ContinuumPolicy(PolicyContext(BLOCK_SIZE, 1 << 20), ContinuumConfig())
        self._chain = JobChain(BlockNames(BLOCK_SIZE), job)
        self._now = 0.0
        self._seen: set[BlockHash] = set()
        self._dead: set[BlockHash] = set()
        self._counts = Superseded()

    def play(self) -> Superseded:
        for index, turn in enumerate(self._job.turns):
            self._ask(index, turn)
            self._now += min(turn.gap_s or 0.0, MAX_GAP_S)
            self._end_pins()
        self._counts.num_blocks = len(self._seen)
        return self._counts

    def _ask(self, index: int, turn: Turn) -> None:
        chain = self._chain.turn(index)
        request = SimRequest(
            str(index),
            num_prompt_tokens=turn.input_tokens,
            num_output_tokens=turn.output_tokens,
            chain=chain,
            block_size=BLOCK_SIZE,
            arrival_time=self._now,
            job=JobRef(self._job.job_id),
        )
        again = self._dead.intersection(request.block_hashes)
        self._counts.num_asked_again += len(again)
        self._dead -= again
        self._policy.on_arrival(request, self._now)
        self._note_dead()
        for pin in list(self._policy.on_admitted(request, self._now)):
            self._policy.on_pin_ended(pin, PinEnd.HANDED_OVER, self._now)
        self._now += TURN_S
        request.num_tokens = turn.input_tokens + turn.output_tokens
        request.num_computed_tokens, request.block_hashes = request.num_tokens, chain
        self._seen.update(chain)
        self._counts.num_turns += 1
        self._policy.on_turn_end(request, self._now)
        self._policy.take_receipt(request)
        calls = [ToolCall(turn.tool or "unnamed")] if turn.calls or turn.gap_kind is GapKind.TOOL else []
        self._policy.on_signal(ToolGapStarted(request.request_id, calls), self._now)

    def _note_dead(self) -> None:
        for dead in self._policy.take_superseded():
            self._counts.num_superseding += 1
            self._counts.num_dead_blocks += len(dead.block_hashes)
            self._dead.update(dead.block_hashes)
            if dead.pin is not None and not dead.num_kept_blocks:
                self._policy.on_pin_ended(dead.pin, PinEnd.SUPERSEDED, self._now)

    def _end_pins(self) -> None:
        for pin, cause in self._policy.due(self._now):
            self._policy.on_pin_ended(pin, cause, self._now)


def main(path: str) -> None:
    found = superseded_in(load_jobs(path, None, None))
    print(f"{found.num_turns:,} turns with {found.num_blocks:,} different blocks of {BLOCK_SIZE} tokens")
    print(f"{found.num_superseding:,} turns go on without {found.num_dead_blocks:,} blocks of their job")
    print(f"{found.num_asked_again:,} of these are asked for again")


if __name__ == "__main__":
    main(sys.argv[1])

"""Lets a drafter guess recorded text: the model of this replay generates what the recording says.

A step verifies the drafts and samples one more token. The first token of a turn comes from the prefill and is
not counted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.drafts.contenders import Contender
from benchmarks.drafts.texts import SpokenJob, SpokenTurn, TurnKind
from engine.core.drafts.drafter import Drafter
from engine.core.drafts.proposals import DraftProposals
from engine.core.kv_cache.block_hash import NO_CONTEXT, BlockHasher
from engine.core.request import Request
from engine.records.messages import JobRef
from engine.records.sampling_params import SamplingParams

BLOCK_SIZE = 16

StepsByDrafts = dict[tuple[int, int], int]
"""Number of steps by (drafts in the step, drafts accepted)."""


@dataclass(slots=True)
class Tally:
    """Counts of one drafter over turns of one kind."""

    turns: int = 0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    """Time of the drafter, including indexing."""

    def add(self, other: Tally) -> None:
        """Adds another tally's counts."""
        self.turns += other.turns
        self.steps += other.steps
        self.tokens += other.tokens
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.seconds += other.seconds

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 1.0

    @property
    def acceptance(self) -> float | None:
        """Returns the share of the drafts that were accepted; None if there were none."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.seconds / self.tokens if self.tokens else 0.0


@dataclass(slots=True)
class Replayed:
    """One contender's tallies."""

    name: str
    by_kind: dict[TurnKind, Tally] = field(default_factory=lambda: {kind: Tally() for kind in TurnKind})
    steps_by_drafts: dict[TurnKind, StepsByDrafts] = field(
        default_factory=lambda: {kind: {} for kind in TurnKind}
    )

    @property
    def total(self) -> Tally:
        """Returns the sum over all kinds."""
        total = Tally()
        for tally in self.by_kind.values():
            total.add(tally)
        return total


def replay(jobs: Sequence[SpokenJob], contender: Contender, max_drafts: int, at_once: int) -> Replayed:
    """Replays all turns with a new drafter; ``at_once`` jobs alternate turn by turn."""
    replayed = Replayed(contender.name)
    drafter = contender.make(lambda request: request.job.job_id if request.job is not None else None)
    for number, (job_id, prompt, turn) in enumerate(_turns(jobs, at_once)):
        tenant = "" if contender.knows_kinds else job_id if contender.knows_jobs else str(number)
        request = _request(f"{job_id} {number}", prompt, JobRef(job_id=job_id, tenant=tenant))
        steps_by_drafts = replayed.steps_by_drafts[turn.kind]
        replayed.by_kind[turn.kind].add(_say(request, turn, drafter, max_drafts, steps_by_drafts))
    return replayed


def _turns(jobs: Sequence[SpokenJob], at_once: int) -> Iterator[tuple[str, list[int], SpokenTurn]]:
    """Yields job id, whole prompt and turn; the jobs that run at once alternate turn by turn."""
    for first in range(0, len(jobs), at_once):
        running = [(job, list[int]()) for job in jobs[first : first + at_once]]
        for index in range(max(len(job.turns) for job, _ in running)):
            for job, history in running:
                if index < len(job.turns):
                    turn = job.turns[index]
                    history += turn.told
                    yield job.job_id, history, turn
                    history += turn.said


def _request(request_id: str, prompt: list[int], job: JobRef) -> Request:
    """Makes a request and hashes only its first block: the drafter needs no more."""
    request = Request(request_id, prompt, SamplingParams(max_tokens=1 << 30), 0.0, job=job)
    BlockHasher(BLOCK_SIZE).extend(request.block_hashes, prompt[:BLOCK_SIZE], NO_CONTEXT)
    return request


def _say(
    request: Request, turn: SpokenTurn, drafter: Drafter, max_drafts: int, steps_by_drafts: StepsByDrafts
) -> Tally:
    """Replays one turn: each step accepts the drafts that match the recording, and adds one token."""
    tally = Tally(turns=1)
    said = turn.said
    tokens = request.all_token_ids
    proposals = DraftProposals(drafter, max_drafts)
    tokens.append(said[0])
    place = 1
    while place < len(said):
        request.num_computed_tokens = len(tokens) - 1
        begun = time.perf_counter()
        drafts = proposals.propose((request,)).get(request.request_id, [])[: len(said) - place - 1]
        num_accepted = _num_equal(drafts, said, place)
        proposals.verified(request.request_id, len(drafts), num_accepted)
        tally.seconds += time.perf_counter() - begun
        tokens += said[place : place + num_accepted + 1]
        place += num_accepted + 1
        tally.steps += 1
        tally.drafted += len(drafts)
        tally.accepted += num_accepted
        pair = (len(drafts), num_accepted)
        steps_by_drafts[pair] = steps_by_drafts.get(pair, 0) + 1
    tally.tokens = len(said) - 1
    begun = time.perf_counter()
    proposals.ended(request)
    tally.seconds += time.perf_counter() - begun
    return tally


def _num_equal(drafts: Sequence[int], said: Sequence[int], place: int) -> int:
    for i, draft in enumerate(drafts):
        if draft != said[place + i]:
            return i
    return len(drafts)

"""All remembered jobs, and the job that a turn belongs to: by its id, else by what its prompt continues.

A turn without an id that continues nothing begins a new job. Until that job has called a tool or had a second
turn, it is most likely a single-turn request. Such jobs have a separate table, so that they never displace
the others, however many there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from heapq import nlargest
from itertools import islice

from continuum.jobs.branches import BranchEnd, BranchListener
from continuum.jobs.continuation import continuation_of
from continuum.jobs.job import MAX_CHILDREN, MAX_DEPTH, BranchTip, Job, JobTable, Turn
from continuum.jobs.shared_prefixes import SharedPrefixes, landmarks_of
from continuum.jobs.tip_index import TipIndex
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request
from tracing.job_ids import INFERRED

MAX_QUESTIONS = 1024
"""Maximum number of inferred jobs with one turn and no tool call, kept to recognize a second turn."""


class JobRegistry(BranchListener):
    """Opens, finds and forgets jobs; knows the tips by which jobs without an id can be recognized."""

    def __init__(self, max_jobs: int, idle_s: float, block_size: int) -> None:
        self._jobs = JobTable(max_jobs, idle_s)
        self._questions = JobTable(min(max_jobs, MAX_QUESTIONS), idle_s)
        self._index = TipIndex(block_size)
        self.unnamed: frozenset[str] = frozenset()
        """Ids that stand for jobs without a client's id: these, too, begin as single-turn requests."""
        self._prefixes = SharedPrefixes()
        """Landmarks of all tips that may be continued, and of the prompts of open turns."""

    def __len__(self) -> int:
        return len(self._jobs) + len(self._questions)

    @property
    def num_established(self) -> int:
        """Number of jobs that are more than a single-turn request without an id."""
        return len(self._jobs)

    @property
    def num_recognizable(self) -> int:
        """Number of branch tips by which a turn without an id would be recognized."""
        return len(self._index)

    def get(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id) or self._questions.get(job_id)

    def newest(self, limit: int, owner: str | None = None) -> list[Job]:
        """At most ``limit`` jobs, the most recently active first; ``owner`` restricts them to that
        owner's."""
        tables = (self._jobs.newest(), self._questions.newest())
        newest = [
            job
            for jobs in tables
            for job in islice((job for job in jobs if owner in (None, job.owner)), limit)
        ]
        return nlargest(limit, newest, key=lambda job: job.last_active_s)

    def open(self, request: Request) -> tuple[Job, BranchTip | None]:
        """Returns the job of a turn that arrives, created if missing, and the tip by which it was
        recognized."""
        assert request.job is not None
        job_id = request.job.job_id
        tenant = request.job.tenant
        job = self.get(job_id) if job_id is not None else None
        if job is not None:
            self._table_of(job).touch(job, request.arrival_time)
            self._adopt(job, request)
            return job, None
        tip = self._index.find(request, tenant)
        if tip is None:
            return self._new(request, job_id, tenant), None
        job = tip.job
        self.establish(job)
        if job_id is not None:
            self._name(job, job_id)
        self._jobs.touch(job, request.arrival_time)
        return job, tip

    def tip_before(self, request: Request, block_size: int) -> BranchTip | None:
        """The branch tip that a prompt continues; None if it continues none. Nothing is opened."""
        assert request.job is not None
        job = None if request.job.job_id is None else self.get(request.job.job_id)
        if job is not None:
            return continuation_of(job.tips, request, block_size).tip
        return self._index.find(request, request.job.tenant)

    def _new(self, request: Request, job_id: str | None, tenant: str | None) -> Job:
        arrival_s = request.arrival_time
        if job_id is not None and job_id not in self.unnamed:
            job = self._jobs.open(job_id, tenant, arrival_s)
        else:
            job = self._questions.open(job_id or _inferred_id(request), tenant, arrival_s)
            job.is_inferred = job_id is None
            job.is_established = False
        job.owner = request.job.owner if request.job is not None else None
        self._adopt(job, request)
        return job

    def _adopt(self, job: Job, request: Request) -> None:
        """Notes at a new job, and at the one that waits for it, that they belong together."""
        assert request.job is not None
        if job.parent_id is not None or request.job.parent_id is None:
            return
        job.parent_id = request.job.parent_id
        parent = self.get(job.parent_id)
        if parent is None or parent.tenant != job.tenant or not _may_wait(parent, job):
            return
        job.parent = parent
        job.awaited_since_s = parent.begun_s
        parent.children.append(job)
        if len(parent.children) > MAX_CHILDREN:
            parent.children.pop(0).parent = None

    def take_up(self, job: Job, num_turns: int, now: float) -> None:
        """Remembers a job that another core has run for so many turns."""
        self._table_of(job).remove(job)
        job.is_established = True
        self._jobs.touch(job, now)
        job.num_turns = num_turns

    def _name(self, job: Job, job_id: str) -> None:
        """Gives the job the id that its client now sends: from now on it is found by that id only."""
        self._jobs.remove(job)
        job.earlier_id = job.job_id
        job.job_id = job_id
        job.is_inferred = False
        for tip in job.tips:
            self._index.remove(tip)
            if tip.pin is not None:
                tip.pin.job_id = job_id

    def establish(self, job: Job) -> None:
        """Marks the job as more than a single-turn request."""
        if not job.is_established:
            self._questions.remove(job)
            self._jobs.touch(job, job.last_active_s)
            job.is_established = True

    def touch(self, job: Job, now: float) -> None:
        """Records that the job was active now."""
        self._table_of(job).touch(job, now)

    def remove(self, job: Job) -> None:
        self._table_of(job).remove(job)

    def forget_idle(self, now: float) -> Iterator[Job]:
        """Removes and yields jobs that were idle for too long or exceed the bounds; one with an open turn or
        a pin stays."""
        yield from self._jobs.forget_idle(now)
        yield from self._questions.forget_idle(now)

    def _table_of(self, job: Job) -> JobTable:
        return self._jobs if job.is_established else self._questions

    # ---- tips ----

    def on_opened(self, tip: BranchTip, block_hashes: list[BlockHash], now: float) -> None:
        tip.beginning = self._index.beginning_of(tip, block_hashes)
        tip.landmarks = landmarks_of(block_hashes, len(block_hashes))
        self.on_restored(tip, now)

    def on_restored(self, tip: BranchTip, now: float) -> None:
        """Indexes the tips of inferred jobs only: a client that sends a job's id always does."""
        tip.job.tips.append(tip)
        if not tip.is_superseded:
            self._prefixes.add(tip.landmarks)
        if tip.job.is_inferred:
            self._index.add(tip)

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        if tip.tools:
            self.establish(tip.job)  # a turn that calls a tool is part of a job

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        self._remove(tip)

    def on_dropped(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        self._remove(tip)

    def _remove(self, tip: BranchTip) -> None:
        tip.job.tips.remove(tip)
        if not tip.is_superseded:
            self._prefixes.remove(tip.landmarks)
        self._index.remove(tip)

    def on_superseded(self, tip: BranchTip, turn: Turn, num_shared_blocks: int, now: float) -> None:
        """Keeps the tip in the index, since a turn may still return to it; its blocks are not retained until
        then."""
        tip.is_superseded = True
        self._prefixes.remove(tip.landmarks)

    def on_job_gone(self, job: Job, now: float) -> None:
        self.remove(job)
        for child in job.children:
            child.parent = None
        if job.parent is not None:
            job.parent.children.remove(job)
            job.parent = None
        job.children.clear()

    # ---- shared prefixes ----

    def begin_turn(self, turn: Turn, num_prompt_blocks: int) -> None:
        block_hashes = turn.request.block_hashes
        turn.landmarks = landmarks_of(block_hashes, min(num_prompt_blocks, len(block_hashes)))
        if turn.number == 1 and turn.tip is None:
            turn.job.num_shared_blocks = self._prefixes.num_surely_shared_blocks(turn.landmarks)
        self._prefixes.add(turn.landmarks)

    def end_turn(self, turn: Turn) -> None:
        self._prefixes.remove(turn.landmarks)

    def num_shared_blocks(self, tip: BranchTip, block_hashes: list[BlockHash], turn: Turn | None) -> int:
        """Upper bound of the blocks at the start of a superseded or dropped tip that others may request:
        exact within its own job, too high by up to a half for other jobs. ``turn``, which is open, does not
        count."""
        job = tip.job
        others = [each for each in job.tips if each is not tip and not each.is_superseded]
        turns = list(job.turns.values())
        num_shared = [each.chain.num_shared(block_hashes) for each in others]
        num_shared += [tip.chain.num_shared(each.request.block_hashes) for each in turns if each is not turn]
        own = [*(each.landmarks for each in others), *(each.landmarks for each in turns)]
        elsewhere = self._prefixes.num_shared_blocks(tip.landmarks, own)
        return min(len(block_hashes), max([*num_shared, elsewhere]))


def _may_wait(parent: Job, job: Job) -> bool:
    """Whether a job may wait for another: neither waits for itself, and no row of waiting jobs is long."""
    above: Job | None = parent
    for _ in range(MAX_DEPTH):
        if above is None or above is job:
            return above is None
        above = above.parent
    return False


def _inferred_id(request: Request) -> str:
    """An id that is the same whenever a trace is replayed; like a client's id, it belongs to its owner."""
    owner = request.job.owner if request.job is not None else None
    inferred = INFERRED + sha256(request.request_id.encode()).hexdigest()[:16]
    return inferred if owner is None else f"{owner}:{inferred}"

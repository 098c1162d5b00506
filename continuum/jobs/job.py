"""Jobs and their turns: what is running, where each branch of a job ended, and which turn continues which.

A job is a set of tips, not one chain: parallel calls, sub-agents that share an id and retries of a turn each
have their own. A tip is the end of a turn; the turn that continues it is recognized by its block hashes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from continuum.jobs.client_hints import ClientHint
from continuum.jobs.shared_prefixes import Checkpoints
from continuum.learning.gap_estimate import GapEstimate
from continuum.learning.job_so_far import JobSoFar
from continuum.learning.work_forecast import JobCourse
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.policy import Pin, PinEnd
from engine.core.request import Request
from engine.records.block_chain import BlockChain
from engine.records.messages import ToolState, TurnReceipt
from estimator.tool_key import ToolKey

MAX_CHILDREN = 64
"""Children remembered per job."""
MAX_DEPTH = 16
"""Jobs that wait for each other in a row; a deeper one has no parent."""
MAX_TIPS = 32
"""Branch tips remembered per job; the oldest without a pin is dropped first."""

Place = tuple[int, float]
"""Priority (smaller first), then rank: the order of a job among the others."""
Beginning = tuple[str | None, BlockHash, tuple[int, ...]]
"""Identifies a turn without a job id: tenant, hash of the blocks of its prompt that must be shared,
and the prompt's tokens after them."""


@dataclass(slots=True, eq=False)
class BranchTip:
    """Where a turn ended."""

    job: Job
    request_id: str
    turn_number: int
    chain: BlockChain
    """Chain of the full blocks whose KV was computed."""
    num_prompt_tokens: int
    ended_s: float
    place: Place
    """The job's place when the turn ended: its pin keeps that place."""
    tools: list[ToolKey] | None = None
    """The tools that run now; empty if the turn called none, None until the API server has parsed the
    reply."""
    plain_tool: str | None = None
    """The running tool as the published rules name it, once the reply was parsed; None for none or
    several."""
    ahead: BlockChain | None = None
    """Full blocks of the next turn's prompt that requests have prewarmed; None if none has."""
    num_found_tokens: int = 0
    """Tokens of them that were cached already, as others had computed them."""
    pin: Pin | None = None
    pin_ended: PinEnd | None = None
    receipt: TurnReceipt | None = None
    external_id: str = ""
    """The request's id as the client knows it."""
    prompt_tail: tuple[int, ...] | None = None
    """Last tokens of the turn's prompt, which full blocks do not cover."""
    beginning: Beginning | None = None
    num_replies: int | None = None
    """Replies in the turn's prompt; None if they were not counted."""
    num_results: int | None = None
    """Tool results in the turn's prompt."""
    asked_ttl_s: float | None = None
    """How long the client asked to keep the turn's KV."""
    hint: ClientHint | None = None
    estimate: GapEstimate | None = None
    """The features of its tool calls and a learned model's correction; None if neither lessons nor a model
    need them."""
    learned: bool = False
    """Whether the duration of its tools was learned, or will never be known."""
    num_output_tokens: int = 0
    num_task_tokens: int = 0
    """Length of the prompt of the branch's first turn: the common beginning of all turns of this
    conversation."""
    landmarks: Checkpoints = ()
    looks_last: bool = False
    """Whether it was counted as the end of its job, since it called no tool."""
    is_counted_answer: bool = False
    """Whether it was counted among the answers that a turn may follow soon."""
    is_superseded: bool = False
    """Whether its job went on without it, so that no turn is expected to continue it."""

    @property
    def is_alone(self) -> bool:
        """Whether the job has no other branch and no running turn."""
        if self.job.turns:
            return False
        return all(each is self or each.is_superseded for each in self.job.tips)

    @property
    def is_answer(self) -> bool:
        """Whether the turn called no tool."""
        return self.tools is not None and not self.tools

    @property
    def is_at_rest(self) -> bool:
        """Whether the tip waits for no tool: the turn called none, or the client canceled the call."""
        if self.hint is not None and self.hint.state is ToolState.CANCELLED:
            return True
        return self.is_answer


@dataclass(slots=True, eq=False)
class Turn:
    """A request of a job from its arrival to its end."""

    job: Job
    request: Request
    number: int
    tip: BranchTip | None
    """The tip that the turn continues; None for the first turn of a branch."""
    num_known_tokens: int = 0
    """Prompt tokens in full blocks whose KV the tip had computed."""
    num_ahead_tokens: int = 0
    """Prompt tokens in full blocks that the tip had computed, or requests have prewarmed."""
    gap_s: float | None = None
    predicted_excess_s: float | None = None
    """Seconds of service that a learned model predicts the job to need beyond usual jobs; None without a
    model."""
    admitted_s: float | None = None
    diverged_at_token: int | None = None
    """Where its prompt diverges from what its job had computed; None if it does not."""
    num_diverged_tokens: int = 0
    num_superseded_tokens: int = 0
    """Tokens of its job that are stale, as its prompt shows."""
    supersedes: str | None = None
    """The request whose tip held these tokens."""
    num_task_tokens: int = 0
    """Length of the prompt of the branch's first turn."""
    landmarks: Checkpoints = ()
    """Landmarks of its prompt."""
    repeats: str | None = None
    """The request that this turn repeats, which the client had cut."""
    kept_since_s: float | None = None
    """Time since which that request had waited, if it was still waiting."""
    keeps_warm: bool = False
    """Whether KV was retained for that request."""

    def admitted(self, now: float) -> None:
        """Called when the turn's request gets its blocks for the first time."""
        self.admitted_s = now
        self.job.queued_s += now - self.request.arrival_time

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens that were cached, or loaded; fewer once a load has failed. None until admission."""
        return None if self.admitted_s is None else self.request.num_cached_tokens

    def closed(self) -> None:
        """Called when the turn's request has ended in any way: what it used counts for the job."""
        if self.num_cached_tokens is not None:
            self.job.num_prompt_tokens += self.request.num_prompt_tokens
            self.job.num_cached_tokens += self.num_cached_tokens
            self.job.num_output_tokens += self.request.num_output_tokens

    @property
    def external_id(self) -> str:
        return self.request.external_id

    @property
    def pin(self) -> Pin | None:
        """The pin of the tip that the turn continues."""
        return self.tip.pin if self.tip is not None else None

    @property
    def warm(self) -> bool:
        """Whether the KV that the turn continues is still retained for it."""
        return self.tip is not None and self.tip.pin is not None

    @property
    def stands_warm(self) -> bool:
        """Whether the queue ranks it as a turn whose KV is retained."""
        return self.warm or self.keeps_warm

    @property
    def waits_since_s(self) -> float:
        return self.request.arrival_time if self.kept_since_s is None else self.kept_since_s

    @property
    def num_recomputed_tokens(self) -> int:
        return max(0, self.num_known_tokens - (self.num_cached_tokens or 0))

    @property
    def num_prewarmed_tokens(self) -> int:
        """Cached tokens that requests have computed for it; at least, if some were cached before them."""
        if self.tip is None:
            return 0
        num_ahead = min(self.num_ahead_tokens, self.num_cached_tokens or 0)
        return max(0, num_ahead - self.num_known_tokens - self.tip.num_found_tokens)


@dataclass(slots=True, eq=False)
class Job:
    """All turns with one job id."""

    job_id: str
    tenant: str | None
    first_arrival_s: float
    rank: float
    """Position among jobs, smaller first: the job's first arrival, shifted by the predicted work; see
    ``order``."""
    last_active_s: float
    priority: int = 0
    """Priority of its latest turn."""
    course: JobCourse | None = None
    """The job's contribution to the forecast of its kind, and its share of that forecast."""
    so_far: JobSoFar | None = None
    """The job's features for learned models, and their last predictions."""
    kind: BlockHash | None = None
    owner: str | None = None
    """Name of the API key that its turns came with."""
    parent: Job | None = None
    """The job that waits for this one, as long as it is remembered."""
    parent_id: str | None = None
    """Its id, as the client named it."""
    awaited_since_s: float = math.inf
    """When the work began that waits for this job."""
    children: list[Job] = field(default_factory=list)
    """Remembered jobs that this one waits for, or has waited for; the newest last, at most MAX_CHILDREN."""
    is_inferred: bool = False
    """Whether the client sent no id: the job was recognized by what its prompts continue."""
    earlier_id: str | None = None
    """The id that it had before its client sent one."""
    is_established: bool = True
    """Whether it is known to be more than a single-turn request."""
    is_finished: bool = False
    """Whether its client announced that no further turn comes; running turns may still end."""
    num_turns: int = 0
    num_shared_blocks: int = 0
    """Blocks at the start of its first prompt that others had requested before: they do not count as its own
    memory."""
    has_come_back: bool = False
    """Whether it returned to a tip that it seemed to have abandoned: it keeps several conversations."""
    queued_s: float = 0.0
    """Total time that its turns waited until they were admitted."""
    num_prompt_tokens: int = 0
    """Tokens of the prompts of its turns that were admitted and have ended."""
    num_cached_tokens: int = 0
    """Those of them that were not computed."""
    num_output_tokens: int = 0
    """Tokens of the answers of these turns."""
    turns: dict[str, Turn] = field(default_factory=dict)
    """Open turns by request id."""
    tips: list[BranchTip] = field(default_factory=list)
    """Tips that no turn has continued yet, oldest first."""

    @property
    def place(self) -> Place:
        return (self.priority, self.rank)

    @property
    def begun_s(self) -> float:
        """When the work began that the job is part of."""
        return min(self.first_arrival_s, self.awaited_since_s)

    @property
    def goes_on_for_parent(self) -> bool:
        """Whether a remembered job waits for this one, and for no other that runs."""
        if self.parent is None:
            return False
        return not any(child.is_running for child in self.parent.children if child is not self)

    def ancestors(self) -> Iterator[Job]:
        """The remembered jobs that wait for this one, the nearest first."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent

    def waiting_for(self) -> Iterator[Request]:
        """The waiting requests of the jobs that this one waits for."""
        for child in self.children:
            yield from (turn.request for turn in child.turns.values() if turn.num_cached_tokens is None)

    @property
    def is_running(self) -> bool:
        """Whether a turn of it has been admitted and has not ended."""
        return any(turn.num_cached_tokens is not None for turn in self.turns.values())

    @property
    def num_pins(self) -> int:
        return sum(1 for tip in self.tips if tip.pin is not None)


class JobTable:
    """Jobs by id, bounded: the longest idle job is forgotten first."""

    def __init__(self, max_jobs: int, idle_s: float) -> None:
        self._max_jobs = max_jobs
        self._idle_s = idle_s
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs.values())

    def get(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def open(self, job_id: str, tenant: str | None, arrival_s: float) -> Job:
        """Returns the job of this id, created if missing, as the most recently active one."""
        job = self._jobs.get(job_id)
        if job is None:
            job = Job(job_id, tenant, arrival_s, arrival_s, arrival_s)
        self.touch(job, arrival_s)
        return job

    def touch(self, job: Job, now: float) -> None:
        """Marks the job as the most recently active, hence the last to be forgotten; adds it if missing."""
        self._jobs[job.job_id] = job
        self._jobs.move_to_end(job.job_id)
        job.last_active_s = now

    def newest(self) -> Iterator[Job]:
        """Iterates over all jobs, the most recently active first."""
        return reversed(self._jobs.values())

    def remove(self, job: Job) -> None:
        if self._jobs.get(job.job_id) is job:
            del self._jobs[job.job_id]

    def forget_idle(self, now: float) -> Iterator[Job]:
        """Removes and yields jobs that were idle for too long or exceed the bound; a job with an open turn or
        a pin stays."""
        while self._jobs:
            job = next(iter(self._jobs.values()))
            too_many = len(self._jobs) > self._max_jobs
            if not too_many and now - job.last_active_s < self._idle_s:
                return
            if job.turns or job.num_pins:
                self._jobs.move_to_end(job.job_id)
                return
            del self._jobs[job.job_id]
            yield job

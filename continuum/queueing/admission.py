"""Admission: whether one more job may begin, given the expected working set of the begun jobs.

If more jobs have begun than fit, each turn evicts blocks that another turn will need. The capacity is the
host tier if there is one; else the pool, and then only turns that return soon count. A running turn needs its
context, except for what it shares with earlier turns; a turn in a tool call needs it in proportion to the
probability of its return. What jobs need is predicted for some times ahead, because contexts grow and jobs
end (``ContextGrowth``); a new job may begin if it fits at each of them. Jobs of a worse priority do not
count, because their pins give way. Each event costs O(log n): a return probability, which changes with time
alone, is updated at geometrically growing intervals.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from itertools import count
from operator import add, sub
from typing import NamedTuple

from continuum.jobs.branches import BranchEnd, BranchListener
from continuum.jobs.job import BranchTip, Job, Turn
from continuum.learning.context_growth import SHARES, Blocks
from continuum.learning.learners import Learners
from continuum.tuning import Tuning
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.policy import PolicyContext
from engine.core.request import Request, RequestStatus
from engine.records.capacity import Capacity, num_that_fit
from engine.records.messages import ToolSignal

USUAL_SMOOTHING = 0.1
"""Weight of a job that begins in the need of usual jobs."""
FIRST_LOOK_S = 1.0
LATER_LOOKS = 1.5
"""The probability of a return is updated when the time since the turn's end has grown by this factor."""


NOTHING: Blocks = (0,) * len(SHARES)


class Need(NamedTuple):
    """The expected need of a turn that has begun."""

    priority: int
    blocks: Blocks
    tenant: str


class WorstNeed(NamedTuple):
    """Expected blocks of the begun jobs and of a new one, at the time when they need most."""

    begun_blocks: int
    own_blocks: int
    ahead_s: float


class WorkingSet(BranchListener):
    """Blocks that the begun jobs are expected to need, and the new jobs that wait until they fit with
    these."""

    def __init__(self, learners: Learners, context: PolicyContext, tuning: Tuning) -> None:
        """``context`` states the sizes of the pool and the host tier."""
        self._tools = learners.tools
        self._growth = learners.growth
        self._context = context
        self._num_each = context.blocks_per_block
        if context.has_host_tier:
            self.num_usable_blocks = int(context.num_host_blocks * tuning.host_share)
            self._horizon_s = tuning.return_horizon_s
        else:
            self.num_usable_blocks = int(context.num_blocks * tuning.pool_share)
            self._horizon_s = tuning.pool_horizon_s
        self._little = int(context.num_blocks * tuning.small_job_share)
        self._block_size = context.block_size
        self._here: dict[str, Need] = {}
        """Needs by request id, of turns that are admitted or that wait to continue a branch."""
        self._awaited: dict[str, Need] = {}
        """Needs of expected turns, by the request id of the branch tip that each continues."""
        self._parked: dict[str, Request] = {}
        """Parked requests by their ids."""
        self._num_parked: Counter[str] = Counter()
        self._needed: dict[int, Blocks] = {}
        """Expected blocks by job priority; priorities that need none are absent."""
        self._needed_by: dict[str, Blocks] = {}
        """The same expected blocks by tenant."""
        self._usual: tuple[float, ...] | None = None
        """Mean need of the jobs that began recently; None before any."""
        self._looks: list[tuple[float, int, BranchTip]] = []
        self._numbers = count()

    # ---- which jobs may begin ----

    def admits(self, turn: Turn, now: float) -> bool:
        """Whether the turn may start now.

        A job may always begin while no other one is running or waiting to continue. Jobs of a worse priority
        do not count, since they may be waiting for this one.
        """
        if not self._is_gated(turn) or not self._is_anybody_here(turn.request.priority):
            return True
        self._look_again(now)
        own = self.own_blocks(turn)
        if max(_plus(self.needed_before(turn.request), own)) <= self.num_usable_blocks:
            return True
        # Each tenant may use an equal part, whatever the others have begun.
        tenant = turn.request.tenant
        num_tenants = len(self._needed_by) + (tenant not in self._needed_by)
        of_tenant = max(_plus(self._needed_by.get(tenant, NOTHING), own))
        return num_tenants > 1 and of_tenant * num_tenants <= self.num_usable_blocks

    def own_blocks(self, turn: Turn) -> Blocks:
        """Expected blocks of a turn's job, except for what it shares with earlier turns."""
        return self._growth.blocks(turn.job, turn.number, self._unshared_blocks(turn.request, turn.job))

    def worst_need(self, turn: Turn) -> WorstNeed:
        """What the begun jobs and the turn's job are expected to need when they need most."""
        needed = self.needed_before(turn.request)
        own = self.own_blocks(turn)
        both = _plus(needed, own)
        worst = both.index(max(both))
        return WorstNeed(needed[worst], own[worst], self._growth.times_s()[worst])

    def _is_anybody_here(self, priority: int) -> bool:
        return any(need.priority <= priority for need in self._here.values())

    def needed_before(self, request: Request) -> Blocks:
        """Blocks that the begun jobs are expected to need, except those of a worse priority."""
        needed = NOTHING
        for priority, blocks in self._needed.items():
            if priority <= request.priority:
                needed = _plus(needed, blocks)
        return needed

    def park(self, turn: Turn) -> bool:
        """Orders the request after all that may start; returns False if it was parked already."""
        request = turn.request
        if request.request_id in self._parked:
            return False
        self._parked[request.request_id] = request
        self._num_parked[request.tenant] += 1
        return True

    def parks(self, turn: Turn) -> bool:
        """Parks a job's first turn while any request of its tenant is parked; returns whether it is
        parked."""
        if not self._num_parked.get(turn.request.tenant) or not self._is_gated(turn):
            return False
        self.park(turn)
        return True

    @property
    def num_parked(self) -> int:
        """Number of new jobs that wait until they fit."""
        return len(self._parked)

    def is_parked(self, request: Request) -> bool:
        return request.request_id in self._parked

    def parked(self) -> Iterable[Request]:
        """The requests of new jobs that wait until they fit."""
        return self._parked.values()

    def _unpark(self, request_id: str) -> None:
        request = self._parked.pop(request_id, None)
        if request is None:
            return
        tenant = request.tenant
        self._num_parked[tenant] -= 1
        if not self._num_parked[tenant]:
            del self._num_parked[tenant]

    def _is_gated(self, turn: Turn) -> bool:
        """Whether the turn is the first of its job, has not run yet, and the job is expected to need more
        than ``small_job_share``. A job that goes on for a waiting one is no new job."""
        if turn.number > 1 or turn.tip is not None or turn.request.status is RequestStatus.PREEMPTED:
            return False
        if turn.job.goes_on_for_parent:
            return False
        num_blocks = self._blocks(turn.request.num_tokens)
        return num_blocks > self._little or max(self._growth.blocks(turn.job, 1, num_blocks)) > self._little

    # ---- which turns have begun ----

    def came(self, request: Request, turn: Turn | None) -> None:
        """Counts the need of a request that is admitted, until ``went``, whether it runs or not."""
        self._unpark(request.request_id)
        tenant = request.tenant
        if turn is None:
            blocks = (self._unshared_blocks(request, None),) * len(SHARES)
        else:
            tenant = turn.job.tenant or ""
            blocks = self.own_blocks(turn)
            if turn.number == 1 and not request.num_preemptions:
                self._observe_begun(blocks)
        need = Need(request.priority, blocks, tenant)
        self._put(self._here, request.request_id, need)

    def _observe_begun(self, blocks: Blocks) -> None:
        usual = blocks if self._usual is None else self._usual
        both = zip(usual, blocks, strict=True)
        self._usual = tuple(mean + USUAL_SMOOTHING * (own - mean) for mean, own in both)

    @property
    def num_that_fit(self) -> int | None:
        """How many more jobs like those that began recently may begin now; None before any began."""
        return num_that_fit(self.num_usable_blocks, self._needed_by_all(), self._usual)

    def capacity(self) -> Capacity:
        """What begun jobs are expected to need, and how many more fit."""
        return Capacity(
            jobs_that_fit=self.num_that_fit,
            waiting_jobs=len(self._parked),
            usable_blocks=self.num_usable_blocks,
            ahead_s=list(self._growth.times_s()),
            needed_blocks=list(self._needed_by_all()),
            usual_blocks=None if self._usual is None else list(self._usual),
        )

    def _needed_by_all(self) -> Blocks:
        needed = NOTHING
        for blocks in self._needed.values():
            needed = _plus(needed, blocks)
        return needed

    def went(self, request: Request) -> None:
        self._unpark(request.request_id)
        self._take(self._here, request.request_id)

    # ---- which turns are expected ----

    def on_opened(self, tip: BranchTip, block_hashes: list[BlockHash], now: float) -> None:
        self._await(tip, now)

    def on_restored(self, tip: BranchTip, now: float) -> None:
        self._await(tip, now)

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        self._await(tip, now)

    def on_hint(self, tip: BranchTip, signal: ToolSignal, now: float) -> None:
        self._await(tip, now)

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        """Counts the turn as present from now on, although it waits."""
        self._forget(tip)
        self.came(turn.request, turn)

    def on_superseded(self, tip: BranchTip, turn: Turn, num_shared_blocks: int, now: float) -> None:
        self._forget(tip)

    def on_dropped(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        self._forget(tip)

    def _await(self, tip: BranchTip, now: float) -> None:
        """Estimates the need of the turn that may continue this tip, again when its tools are known."""
        self._look_again(now)
        if tip.request_id not in self._awaited:
            heapq.heappush(self._looks, (now + FIRST_LOOK_S, next(self._numbers), tip))
        self._weigh(tip, now)

    def _forget(self, tip: BranchTip) -> None:
        """Stops counting the tip: no turn is expected to continue it."""
        self._take(self._awaited, tip.request_id)

    def _look_again(self, now: float) -> None:
        while self._looks and self._looks[0][0] <= now:
            _, number, tip = heapq.heappop(self._looks)
            if tip.request_id in self._awaited:
                self._weigh(tip, now)
                elapsed_s = max(FIRST_LOOK_S, now - tip.ended_s)
                heapq.heappush(self._looks, (tip.ended_s + LATER_LOOKS * elapsed_s, number, tip))

    def _weigh(self, tip: BranchTip, now: float) -> None:
        """Updates the tip's need: its context, the growth of its next prompt and of later ones, times the
        probability that the turn comes."""
        probability = 0.0
        if not tip.is_at_rest:
            probability = self._tools.return_probability(tip, now + self._horizon_s, now)
            probability *= 1 - self._tools.last_turn_probability(tip.tools, tip.job.tenant)
        shared_blocks = self._num_each * tip.job.num_shared_blocks
        num_blocks = max(0, self._context.blocks_for(len(tip.chain)) - shared_blocks)
        soon, *later = self._growth.blocks(tip.job, tip.turn_number, num_blocks)
        growth_tokens = self._tools.prompt_growth(tip.tools, tip.job.tenant) or 0.0
        soon_blocks = max(0.0, soon + self._num_each * growth_tokens / self._block_size)
        blocks = tuple(round(probability * num) for num in (soon_blocks, *later))
        need = Need(tip.place[0], blocks, tip.job.tenant or "")
        self._put(self._awaited, tip.request_id, need)

    def _put(self, part: dict[str, Need], name: str, need: Need) -> None:
        self._take(part, name)
        part[name] = need
        if any(need.blocks):
            self._needed[need.priority] = _plus(self._needed.get(need.priority, NOTHING), need.blocks)
            self._needed_by[need.tenant] = _plus(self._needed_by.get(need.tenant, NOTHING), need.blocks)

    def _take(self, part: dict[str, Need], name: str) -> None:
        need = part.pop(name, None)
        if need is None or not any(need.blocks):
            return
        left = _minus(self._needed.pop(need.priority), need.blocks)
        if any(left):
            self._needed[need.priority] = left
        left = _minus(self._needed_by.pop(need.tenant), need.blocks)
        if any(left):
            self._needed_by[need.tenant] = left

    def _unshared_blocks(self, request: Request, job: Job | None) -> int:
        num_shared_blocks = 0 if job is None else job.num_shared_blocks
        return max(0, self._blocks(request.num_tokens) - self._num_each * num_shared_blocks)

    def _blocks(self, num_tokens: int) -> int:
        """Blocks of the pool that a computed context of this many tokens takes."""
        return self._context.blocks_for(-(-num_tokens // self._block_size))


def _plus(these: Blocks, those: Blocks) -> Blocks:
    return tuple(map(add, these, those))


def _minus(these: Blocks, those: Blocks) -> Blocks:
    return tuple(map(sub, these, those))

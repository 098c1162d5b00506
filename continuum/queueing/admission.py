"""Admission: whether one more job may begin, given the working set that the begun jobs are expected
to need.

When more jobs have begun than fit, each turn evicts what another one returns for. The capacity is
the host tier where there is one; else the pool, and then only turns that return soon count. A
running turn needs its context, except for what it shares with earlier turns; a turn in a tool call
needs it in proportion to the probability of its return. Jobs of a worse priority count for nothing,
because their pins give way. Each event costs O(log n): what time alone changes is evaluated again
when as much time as before, times a factor, has passed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count
from typing import NamedTuple

from continuum.jobs.branches import BranchEnd, BranchListener
from continuum.jobs.job import BranchTip, Job, Turn
from continuum.learning.tool_stats import ToolStats
from continuum.tuning import Tuning
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.policy import PolicyContext
from engine.core.request import Request, RequestStatus
from engine.messages import ToolSignal

FIRST_LOOK_S = 1.0
LATER_LOOKS = 1.5
"""The probability of a return is evaluated again when the call has run for this many times as long."""


class Need(NamedTuple):
    """The expected need of a begun turn."""

    priority: int
    num_blocks: int
    tenant: str


class WorkingSet(BranchListener):
    """Blocks that the begun jobs are expected to need, and the new jobs that wait until they fit
    besides them."""

    def __init__(self, tools: ToolStats, context: PolicyContext, tuning: Tuning) -> None:
        """``context`` says how much the pool and the host tier hold."""
        self._tools = tools
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
        """Needs by request, of turns that are admitted or that wait to continue a branch."""
        self._awaited: dict[str, Need] = {}
        """Needs of turns to come, by the request that ended last in the job or in a branch of
        it."""
        self._parked: dict[str, str] = {}
        """Waiting requests, with their tenants."""
        self._num_parked: Counter[str] = Counter()
        self._needed: dict[int, int] = {}
        """Expected blocks, by priority of the jobs that have begun and need any."""
        self._needed_by: dict[str, int] = {}
        """Expected blocks of the same jobs by tenant."""
        self._looks: list[tuple[float, int, BranchTip]] = []
        self._numbers = count()

    # ---- who may begin ----

    def admits(self, turn: Turn, now: float) -> bool:
        """Whether the turn may start now.

        A job may always begin while no other one is here. Jobs of a worse priority do not count as
        here, since they may be waiting behind this one.
        """
        if not self._is_gated(turn) or not self._is_anybody_here(turn.request.priority):
            return True
        self._look_again(now)
        own, tenant = self._own_blocks(turn.request, turn.job), turn.request.tenant
        if self.needed_before(turn.request) + own <= self.num_usable_blocks:
            return True
        # Each tenant may use its equal part, whatever the others have begun.
        num_tenants = len(self._needed_by) + (tenant not in self._needed_by)
        return (
            num_tenants > 1 and (self._needed_by.get(tenant, 0) + own) * num_tenants <= self.num_usable_blocks
        )

    def _is_anybody_here(self, priority: int) -> bool:
        return any(need.priority <= priority for need in self._here.values())

    def needed_before(self, request: Request) -> int:
        """Blocks that the begun jobs are expected to need, without those of a worse priority."""
        needed = (num for priority, num in self._needed.items() if priority <= request.priority)
        return sum(needed)

    def park(self, turn: Turn) -> bool:
        """The request waits behind all that may start; False if it did already."""
        request_id, tenant = turn.request.request_id, turn.request.tenant
        if request_id in self._parked:
            return False
        self._parked[request_id] = tenant
        self._num_parked[tenant] += 1
        return True

    def parks(self, turn: Turn) -> bool:
        """Whether it is parked: while any request of its tenant is, later jobs line up behind it."""
        if not self._num_parked.get(turn.request.tenant) or not self._is_gated(turn):
            return False
        self.park(turn)
        return True

    def _unpark(self, request_id: str) -> None:
        tenant = self._parked.pop(request_id, None)
        if tenant is None:
            return
        self._num_parked[tenant] -= 1
        if not self._num_parked[tenant]:
            del self._num_parked[tenant]

    def _is_gated(self, turn: Turn) -> bool:
        """Whether it is a job's first turn, has not run yet, and needs more than a little."""
        if turn.number > 1 or turn.tip is not None or turn.request.status is RequestStatus.PREEMPTED:
            return False
        return self._blocks(turn.request.num_tokens) > self._little

    # ---- who has begun ----

    def came(self, request: Request, job: Job | None) -> None:
        """It is admitted, and counts until it has gone, running or not."""
        self._unpark(request.request_id)
        tenant = request.tenant if job is None else job.tenant or ""
        need = Need(request.priority, self._own_blocks(request, job), tenant)
        self._put(self._here, request.request_id, need)

    def went(self, request: Request) -> None:
        self._unpark(request.request_id)
        self._take(self._here, request.request_id)

    # ---- who is expected back ----

    def on_opened(self, tip: BranchTip, block_hashes: list[BlockHash], now: float) -> None:
        self._await(tip, now)

    def on_restored(self, tip: BranchTip, now: float) -> None:
        self._await(tip, now)

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        self._await(tip, now)

    def on_hint(self, tip: BranchTip, signal: ToolSignal, now: float) -> None:
        self._await(tip, now)

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        """The turn counts as here from now on: it waits."""
        self._forget(tip)
        self.came(turn.request, tip.job)

    def on_superseded(self, tip: BranchTip, turn: Turn, num_shared_blocks: int, now: float) -> None:
        self._forget(tip)

    def on_dropped(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        self._forget(tip)

    def _await(self, tip: BranchTip, now: float) -> None:
        """A turn has ended there, or more is known of the tools that it called."""
        self._look_again(now)
        if tip.request_id not in self._awaited:
            heapq.heappush(self._looks, (now + FIRST_LOOK_S, next(self._numbers), tip))
        self._weigh(tip, now)

    def _forget(self, tip: BranchTip) -> None:
        """No turn is expected back there any more."""
        self._take(self._awaited, tip.request_id)

    def _look_again(self, now: float) -> None:
        while self._looks and self._looks[0][0] <= now:
            _, number, tip = heapq.heappop(self._looks)
            if tip.request_id in self._awaited:
                self._weigh(tip, now)
                elapsed_s = max(FIRST_LOOK_S, now - tip.ended_s)
                heapq.heappush(self._looks, (tip.ended_s + LATER_LOOKS * elapsed_s, number, tip))

    def _weigh(self, tip: BranchTip, now: float) -> None:
        """Its context and what its next prompt adds, times the probability that it comes."""
        probability = 0.0
        if not tip.is_at_rest:
            probability = self._tools.return_probability(tip, now + self._horizon_s, now)
            probability *= 1 - self._tools.last_turn_probability(tip.tools, tip.job.tenant)
        growth_tokens = self._tools.prompt_growth(tip.tools, tip.job.tenant) or 0.0
        num_blocks = self._context.blocks_for(len(tip.chain)) - self._num_each * tip.job.num_shared_blocks
        growth_blocks = self._num_each * growth_tokens / self._block_size
        num_expected = max(0, round(probability * (num_blocks + growth_blocks)))
        need = Need(tip.place[0], num_expected, tip.job.tenant or "")
        self._put(self._awaited, tip.request_id, need)

    def _put(self, part: dict[str, Need], name: str, need: Need) -> None:
        self._take(part, name)
        part[name] = need
        if need.num_blocks:
            self._needed[need.priority] = self._needed.get(need.priority, 0) + need.num_blocks
            self._needed_by[need.tenant] = self._needed_by.get(need.tenant, 0) + need.num_blocks

    def _take(self, part: dict[str, Need], name: str) -> None:
        need = part.pop(name, None)
        if need is None or not need.num_blocks:
            return
        num_left = self._needed.pop(need.priority) - need.num_blocks
        if num_left:
            self._needed[need.priority] = num_left
        num_left = self._needed_by.pop(need.tenant) - need.num_blocks
        if num_left:
            self._needed_by[need.tenant] = num_left

    def _own_blocks(self, request: Request, job: Job | None) -> int:
        num_shared_blocks = 0 if job is None else job.num_shared_blocks
        return max(0, self._blocks(request.num_tokens) - self._num_each * num_shared_blocks)

    def _blocks(self, num_tokens: int) -> int:
        """Of the pool, that a context of so many tokens takes when it is computed."""
        return self._context.blocks_for(-(-num_tokens // self._block_size))

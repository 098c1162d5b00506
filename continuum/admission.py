"""The working-set ledger: whether one more job may begin, by what those that have begun will need.

When more have begun than can be held, each turn drops what another comes back for. What can be held is the
host tier, where there is one; else the pool, and there only who is soon back counts. Who is here needs its
context, but for what it shares with who came before; who is in a tool call, as surely as it is expected back.
Jobs of a worse priority count for nothing: what they hold gives way.
Each event costs O(log n): what time alone changes is looked at again when half as much of it again has
passed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count
from typing import NamedTuple

from continuum.jobs import Frontier, Job, Turn
from continuum.tool_memory import ToolMemory
from continuum.tuning import Tuning
from engine.request import Request, RequestStatus

FIRST_LOOK_S = 1.0
LATER_LOOKS = 1.5
"""How likely a return is, is asked again when the call has run for so many times as long."""


class Need(NamedTuple):
    """Of one that has begun."""

    priority: int
    num_blocks: int
    tenant: str


class WorkingSet:
    """Blocks that the begun jobs are expected to need, and the new jobs that wait for room beside them."""

    def __init__(
        self, tools: ToolMemory, num_blocks: int, num_host_blocks: int, block_size: int, tuning: Tuning
    ) -> None:
        """``num_blocks``: of the pool. ``num_host_blocks``: of the host tier; 0 without one."""
        self._tools = tools
        if num_host_blocks:
            self.num_room_blocks = int(num_host_blocks * tuning.host_share)
            self._horizon_s = tuning.return_horizon_s
        else:
            self.num_room_blocks = int(num_blocks * tuning.pool_share)
            self._horizon_s = tuning.pool_horizon_s
        self._little = int(num_blocks * tuning.little_share)
        self._block_size = block_size
        self._here: dict[str, Need] = {}
        """By request: admitted, or back for what its job has."""
        self._awaited: dict[str, Need] = {}
        """By the request that ended last in a job, or in a branch of one."""
        self._parked: dict[str, str] = {}
        """Requests, with their tenants."""
        self._num_parked: Counter[str] = Counter()
        self._needed: dict[int, int] = {}
        """Blocks, by priority of those that have begun and need any, as likely as they come."""
        self._needed_by: dict[str, int] = {}
        """The same by tenant."""
        self._looks: list[tuple[float, int, Frontier]] = []
        self._numbers = count()

    # ---- who may begin ----

    def admits(self, turn: Turn, now: float) -> bool:
        """Whether the turn may start now. Who begins while nobody else is here always may; those of a worse
        priority are as good as not here, as they may be waiting behind this one."""
        if not self._is_gated(turn) or not self._is_anybody_here(turn.request.priority):
            return True
        self._look_again(now)
        own, tenant = self._own_blocks(turn.request, turn.job), turn.request.tenant
        if self.needed_before(turn.request) + own <= self.num_room_blocks:
            return True
        # What other tenants have begun leaves each its equal part.
        num_tenants = len(self._needed_by) + (tenant not in self._needed_by)
        return (
            num_tenants > 1 and (self._needed_by.get(tenant, 0) + own) * num_tenants <= self.num_room_blocks
        )

    def _is_anybody_here(self, priority: int) -> bool:
        return any(need.priority <= priority for need in self._here.values())

    def needed_before(self, request: Request) -> int:
        """Blocks that those who have begun are expected to need, but for those of a worse priority."""
        needed = (num for priority, num in self._needed.items() if priority <= request.priority)
        return sum(needed)

    def park(self, turn: Turn) -> bool:
        """It waits behind all that may start; False if it did already."""
        request_id, tenant = turn.request.request_id, turn.request.tenant
        if request_id in self._parked:
            return False
        self._parked[request_id] = tenant
        self._num_parked[tenant] += 1
        return True

    def parks(self, turn: Turn) -> bool:
        """Whether it waits there: while any of its tenant does, jobs that come later line up behind."""
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
        """Whether it is a job's first, has not run yet, and takes more than a little."""
        if turn.number > 1 or turn.frontier is not None or turn.request.status is RequestStatus.PREEMPTED:
            return False
        return self._blocks(turn.request.num_tokens) > self._little

    # ---- who has begun ----

    def came(self, request: Request, job: Job | None) -> None:
        """It is admitted, and here until it has gone, running or not."""
        self._unpark(request.request_id)
        tenant = request.tenant if job is None else job.tenant or ""
        need = Need(request.priority, self._own_blocks(request, job), tenant)
        self._put(self._here, request.request_id, need)

    def went(self, request: Request) -> None:
        self._unpark(request.request_id)
        self._take(self._here, request.request_id)

    def continued(self, frontier: Frontier, request: Request) -> None:
        """Its next turn is back, and waits."""
        self.forget(frontier)
        self.came(request, frontier.job)

    def awaits(self, frontier: Frontier, now: float) -> None:
        """A turn has ended there, or more is known of what it called."""
        self._look_again(now)
        if frontier.request_id not in self._awaited:
            heapq.heappush(self._looks, (now + FIRST_LOOK_S, next(self._numbers), frontier))
        self._weigh(frontier, now)

    def forget(self, frontier: Frontier) -> None:
        """Nobody is expected back there any more."""
        self._take(self._awaited, frontier.request_id)

    def _look_again(self, now: float) -> None:
        while self._looks and self._looks[0][0] <= now:
            _, number, frontier = heapq.heappop(self._looks)
            if frontier.request_id in self._awaited:
                self._weigh(frontier, now)
                elapsed_s = max(FIRST_LOOK_S, now - frontier.ended_s)
                heapq.heappush(self._looks, (frontier.ended_s + LATER_LOOKS * elapsed_s, number, frontier))

    def _weigh(self, frontier: Frontier, now: float) -> None:
        """Its context and what its next prompt adds, times how likely that comes."""
        probability = 0.0
        if not frontier.is_at_rest:
            probability = self._tools.return_probability(frontier, now + self._horizon_s, now)
            probability *= 1 - self._tools.last_turn_probability(frontier.tools, frontier.job.tenant)
        growth_tokens = self._tools.prompt_growth(frontier.tools, frontier.job.tenant) or 0.0
        num_blocks = len(frontier.chain) - frontier.job.num_shared_blocks + growth_tokens / self._block_size
        num_expected = max(0, round(probability * num_blocks))
        need = Need(frontier.place[0], num_expected, frontier.job.tenant or "")
        self._put(self._awaited, frontier.request_id, need)

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
        return max(0, self._blocks(request.num_tokens) - num_shared_blocks)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

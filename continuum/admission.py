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
        self._parked: set[str] = set()
        self._needed: dict[int, int] = {}
        """Blocks, by priority of those that have begun and need any, as likely as they come."""
        self._looks: list[tuple[float, int, Frontier]] = []
        self._numbers = count()

    # ---- who may begin ----

    def admits(self, turn: Turn, now: float) -> bool:
        """Whether the turn may start now; who begins while nobody else is here always may."""
        if not self._here or not self._is_gated(turn):
            return True
        self._look_again(now)
        own_blocks = self._own_blocks(turn.request, turn.job)
        return self.needed_before(turn.request) + own_blocks <= self.num_room_blocks

    def needed_before(self, request: Request) -> int:
        """Blocks that those who have begun are expected to need, but for those of a worse priority."""
        needed = (num for priority, num in self._needed.items() if priority <= request.priority)
        return sum(needed)

    def park(self, turn: Turn) -> bool:
        """It waits behind all that may start; False if it did already."""
        if turn.request.request_id in self._parked:
            return False
        self._parked.add(turn.request.request_id)
        return True

    def parks(self, turn: Turn) -> bool:
        """Whether it waits there: while anybody does, jobs that come later line up behind."""
        if not self._parked or not self._is_gated(turn):
            return False
        self._parked.add(turn.request.request_id)
        return True

    def _is_gated(self, turn: Turn) -> bool:
        """Whether it is a job's first, has not run yet, and takes more than a little."""
        if turn.number > 1 or turn.frontier is not None or turn.request.status is RequestStatus.PREEMPTED:
            return False
        return self._blocks(turn.request.num_tokens) > self._little

    # ---- who has begun ----

    def came(self, request: Request, job: Job | None) -> None:
        """It is admitted, and here until it has gone, running or not."""
        self._parked.discard(request.request_id)
        need = Need(request.priority, self._own_blocks(request, job))
        self._put(self._here, request.request_id, need)

    def went(self, request: Request) -> None:
        self._parked.discard(request.request_id)
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
        need = Need(frontier.place[0], max(0, round(probability * num_blocks)))
        self._put(self._awaited, frontier.request_id, need)

    def _put(self, part: dict[str, Need], name: str, need: Need) -> None:
        self._take(part, name)
        part[name] = need
        self._needed[need.priority] = self._needed.get(need.priority, 0) + need.num_blocks

    def _take(self, part: dict[str, Need], name: str) -> None:
        need = part.pop(name, None)
        if need is None:
            return
        num_left = self._needed.pop(need.priority, 0) - need.num_blocks
        if num_left:
            self._needed[need.priority] = num_left

    def _own_blocks(self, request: Request, job: Job | None) -> int:
        num_shared_blocks = 0 if job is None else job.num_shared_blocks
        return max(0, self._blocks(request.num_tokens) - num_shared_blocks)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

"""Shares the tokens of a step among the owners of several API keys.

A step takes equally long for every request in it, so an owner that fills it makes all others wait. An owner
that wants less than an equal part of a step's tokens gets all it wants. The others together get as many
tokens as make the step longer by a fixed ratio. The cost of an empty step, and of each token, is learned from
the steps while there are several owners; with one owner nothing is limited and nothing learned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt

from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.parts import Batch, ChunkLimit, Left, SchedulerPart
from engine.core.request import Request, RequestStatus
from engine.core.step import Step

RECENT_S = 10.0
"""An owner with a request within this time may send another one, so steps stay short for it."""
FLOOD_REQUESTS = 8
"""Open requests that make an owner a flood: it does not wait for one answer before the next request."""
SHARED = 1.0
SHARED_WITH_FLOOD = 0.25
"""Ratio by which the other owners may lengthen a step that serves owners who want little."""
BEFORE = 1.0
"""Ratio by which a flood alone may lengthen an empty step: another owner may come while it runs."""
OF_WAITING = 64
"""Tokens that a waiting request is assumed to want, except for the first, whose number is known."""

_DECAY = 0.99
_FEWEST_STEPS = 8.0
_UNKNOWN = 16.0
_LEAST = 2.0
_MOST = 4096.0


class StepCost:
    """Estimates how many tokens double an empty step's time: a least-squares line through recent steps.

    Where these scatter, a token is assumed to cost more rather than less.
    """

    def __init__(self) -> None:
        self._weight = self._tokens = self._seconds = 0.0
        self._tokens2 = self._both = self._seconds2 = 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        tokens = float(num_tokens)
        self._weight = self._weight * _DECAY + 1.0
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + seconds
        self._tokens2 = self._tokens2 * _DECAY + tokens * tokens
        self._both = self._both * _DECAY + tokens * seconds
        self._seconds2 = self._seconds2 * _DECAY + seconds * seconds

    @property
    def tokens_of_an_empty_step(self) -> float:
        if self._weight < _FEWEST_STEPS:
            return _UNKNOWN
        mean_tokens = self._tokens / self._weight
        mean_s = self._seconds / self._weight
        variance = self._tokens2 / self._weight - mean_tokens * mean_tokens
        if variance < 1.0:
            return _UNKNOWN
        slope = (self._both / self._weight - mean_tokens * mean_s) / variance
        scatter = self._seconds2 / self._weight - mean_s * mean_s - slope * slope * variance
        token_s = max(0.0, slope) + sqrt(max(0.0, scatter) / (self._weight * variance))
        if token_s * _MOST <= mean_s:
            return _MOST
        return min(_MOST, max(_LEAST, (mean_s - token_s * mean_tokens) / token_s))


@dataclass(slots=True)
class StepLimit(ChunkLimit):
    """Limits the tokens of one step for the owners that want much."""

    owners: set[str]
    num_left: int
    granted: dict[str, int] = field(default_factory=dict)
    """Tokens that each of their running requests may have."""

    def cut(self, request: Request, start: int, num_tokens: int, hit: Sequence[KVCacheBlock] | None) -> int:
        """A running request gets its grant; one that starts gets what the running ones leave."""
        if request.owner not in self.owners:
            return num_tokens
        if request.status is RequestStatus.RUNNING:
            return min(num_tokens, self.granted.get(request.request_id, 0))
        return min(num_tokens, self.num_left)

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        if request.status is not RequestStatus.RUNNING:
            self.commit_drafts(request, num_tokens)

    def cut_drafts(self, request: Request, num_drafts: int) -> int:
        return num_drafts if request.owner not in self.owners else min(num_drafts, self.num_left)

    def commit_drafts(self, request: Request, num_drafts: int) -> None:
        if request.owner in self.owners:
            self.num_left -= num_drafts

    def defers(self, request: Request) -> bool:
        return request.owner in self.owners and self.num_left < 1


class StepShares(SchedulerPart):
    """Tracks which owners were here lately, and what steps cost."""

    def __init__(self) -> None:
        self._seen_s: dict[str, float] = {}
        """When each owner last sent a request, the longest ago first."""
        self._num_open: dict[str, int] = {}
        """How many requests of each owner have not ended."""
        self.is_shared = False
        """Whether several owners were here lately; if not, nothing is limited."""
        self._cost = StepCost()
        self._planned: deque[tuple[SchedulerOutput, float]] = deque()
        self._ended_s = 0.0
        self._turn = 0
        """Index of the decode that is next in turn, where not all can have a token in one step."""

    def arrived(self, request: Request, now: float) -> None:
        """Count a request that came in."""
        owner = request.owner
        self._seen_s.pop(owner, None)
        self._seen_s[owner] = now
        self._num_open[owner] = self._num_open.get(owner, 0) + 1
        self.is_shared = len(self._seen_s) > 1

    def left(self, request: Request, how: Left, now: float) -> None:
        """Count a request that has ended."""
        if how is Left.PREEMPTED:
            return
        owner = request.owner
        self._num_open[owner] -= 1
        if not self._num_open[owner]:
            del self._num_open[owner]

    def fill(self, plan: SchedulerOutput, requests: Mapping[str, Request], now: float) -> None:
        """Note when a step was planned, for its cost."""
        if self.is_shared:
            self._planned.append((plan, now))

    def take(self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        """Learn from a step whose output returned."""
        if not self.is_shared:
            return
        while self._planned:
            planned, planned_s = self._planned.popleft()
            if planned is plan:
                num_tokens = plan.total_num_scheduled_tokens
                if num_tokens:
                    self._cost.observe(num_tokens, now - max(planned_s, self._ended_s))
                self._ended_s = now
                return

    def limit(self, step: Step, batch: Batch, inner: tuple[ChunkLimit, ...]) -> ChunkLimit | None:
        """Limit the step. Requests that other limits stop count as wanting nothing."""
        if not self.is_shared:
            return None
        running: Sequence[Request] = batch.running
        if inner:
            running = [request for request in running if _may_go_on(request, inner)]
        return self.share(running, batch.waiting.peek(), step.now)

    def share(self, running: Sequence[Request], next_one: Request | None, now: float) -> StepLimit | None:
        """The limit for the owners that want much of a step; None: no limit. ``next_one`` is first in the
        queue."""
        num_open = self._num_open
        num_waiting = dict(num_open)
        wanted = dict.fromkeys(num_open, 0)
        for request in running:
            wanted[request.owner] += _missing(request)
            num_waiting[request.owner] -= 1
        if next_one is not None:
            wanted[next_one.owner] += next_one.num_tokens
            num_waiting[next_one.owner] -= 1
        for owner, number in num_waiting.items():
            wanted[owner] += number * OF_WAITING
        self._drop_absent(wanted, now)
        if not self.is_shared or not wanted:
            return None
        empty_step = self._cost.tokens_of_an_empty_step
        heavy = {owner for owner, tokens in wanted.items() if tokens * len(wanted) >= sum(wanted.values())}
        is_flood = any(num_open[owner] >= FLOOD_REQUESTS for owner in heavy)
        if len(heavy) < len(wanted):
            light = sum(tokens for owner, tokens in wanted.items() if owner not in heavy)
            num_tokens = (empty_step + light) * (SHARED_WITH_FLOOD if is_flood else SHARED)
        elif is_flood and len(wanted) < len(self._seen_s):
            num_tokens = empty_step * BEFORE
        else:
            return None
        return self._granted(StepLimit(heavy, max(1, int(num_tokens))), running)

    def _drop_absent(self, here: dict[str, int], now: float) -> None:
        for owner, seen_s in list(self._seen_s.items()):
            if now - seen_s <= RECENT_S:
                break
            if owner not in here:
                del self._seen_s[owner]
        self.is_shared = len(self._seen_s) > 1

    def _granted(self, limit: StepLimit, running: Sequence[Request]) -> StepLimit:
        """Grant one token to each decode, in turn where they are too many, then the rest to the oldest."""
        own = [(request, _missing(request)) for request in running if request.owner in limit.owners]
        single = [request for request, missing in own if missing == 1]
        if len(single) > limit.num_left:
            first = self._turn % len(single)
            self._turn += limit.num_left
            single = [*single[first:], *single[:first]][: limit.num_left]
        for request in single:
            limit.granted[request.request_id] = 1
        limit.num_left -= len(single)
        for request, missing in own:
            if missing > 1 and limit.num_left:
                tokens = limit.granted[request.request_id] = min(missing, limit.num_left)
                limit.num_left -= tokens
        return limit


def _may_go_on(request: Request, limits: Sequence[ChunkLimit]) -> bool:
    return all(limit.cut(request, request.num_computed_tokens, 1, None) for limit in limits)


def _missing(request: Request) -> int:
    return request.num_tokens + request.num_output_placeholders - request.num_computed_tokens

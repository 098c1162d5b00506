"""Predicts the contexts of jobs: how much each turn adds, how many turns follow, and how fast they follow.

Jobs of one kind grow alike. Each mean of a kind is mixed with that of all its tenant's jobs, by the number of
its observations (Bühlmann's credibility, ASTIN Bulletin 4, 1967).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from continuum.jobs.branches import BranchEnd, BranchListener
from continuum.jobs.job import BranchTip, Job, Turn
from continuum.learning.job_work import kind_name
from engine.core.policy import PolicyContext

MAX_KINDS = 256
"""Maximum number of kinds; beyond it, the least recently seen kind is forgotten."""
MAX_TURNS = 128
"""Jobs with more turns grow like jobs with this many."""
MAX_AHEAD = 32
"""Turns that are looked ahead."""
MAX_SEEN = 512.0
"""When this many turns of a number were seen, their counts are halved, so that old jobs count less."""
PRIOR_STRENGTH = 8.0
"""The mean of a tenant's jobs counts as much as this many observations of a kind."""
PERIOD_SMOOTHING = 0.02
"""Weight of a new turn in the mean time between the ends of a job's turns."""
SHARES = (0.0, 0.5, 1.0)
"""When the context is predicted, as shares of the horizon."""

Blocks = tuple[int, ...]
"""Expected blocks at each of ``SHARES``."""


class Next(NamedTuple):
    """What follows a turn: another one with this probability, which then adds this many tokens."""

    probability: float
    num_tokens: float


class _Turns:
    """What followed the turns of one number of jobs of one kind."""

    __slots__ = ("num_followed", "num_last", "num_tokens")

    def __init__(self) -> None:
        self.num_followed = self.num_last = self.num_tokens = 0.0

    def followed(self, num_tokens: int) -> None:
        self.num_followed += 1
        self.num_tokens += num_tokens
        self._fade()

    def last(self, count: int) -> None:
        """Counts a job that ended after this turn; a ``count`` of -1 undoes that."""
        self.num_last = max(0.0, self.num_last + count)
        self._fade()

    def _fade(self) -> None:
        if self.num_followed + self.num_last > MAX_SEEN:
            self.num_followed /= 2
            self.num_last /= 2
            self.num_tokens /= 2

    def mixed(self, prior: Next | None) -> Next | None:
        """The means of these turns, mixed with a prior; None if nothing is known of either."""
        strength = 0.0 if prior is None else PRIOR_STRENGTH
        usual = prior or Next(0.0, 0.0)
        num_seen = self.num_followed + self.num_last + strength
        if not num_seen:
            return None
        num_followed = self.num_followed + strength
        num_tokens = self.num_tokens + strength * usual.num_tokens
        return Next(
            (self.num_followed + strength * usual.probability) / num_seen,
            num_tokens / num_followed if num_followed else 0.0,
        )


class _Kind:
    """Jobs of one kind, by the number of turns that they have had."""

    __slots__ = ("_turns",)

    def __init__(self) -> None:
        self._turns: dict[int, _Turns] = {}

    def turns(self, number: int) -> _Turns:
        return self._turns.setdefault(min(number, MAX_TURNS), _Turns())

    def mixed(self, number: int, prior: Next | None) -> Next | None:
        turns = self._turns.get(min(number, MAX_TURNS))
        return prior if turns is None else turns.mixed(prior)


class ContextGrowth(BranchListener):
    """Predicts the blocks of a job from now until a horizon."""

    def __init__(self, context: PolicyContext, horizon_s: float) -> None:
        self._horizon_s = horizon_s
        self._block_size = context.block_size
        self._blocks_per_token = context.blocks_per_block / context.block_size
        self._kinds: OrderedDict[Hashable, _Kind] = OrderedDict()
        """What is counted of each kind, by its name, and of all jobs of each tenant, by the tenant."""
        self._period_s = 0.0
        """Mean time between the ends of a turn and of the next one; 0 before any turn followed one."""

    def blocks(self, job: Job, num_turns: int, num_blocks: int) -> Blocks:
        """Expected blocks of a job that has had this many turns and has this many blocks: at each time what
        it has and has gained, times the probability that it still lasts."""
        if not self._period_s:
            return (num_blocks,) * len(SHARES)
        kinds = [kind for name in _names(job) if (kind := self._kinds.get(name)) is not None]
        size = float(num_blocks)
        lasts = 1.0
        sizes = [size]  # each further one: the job has had one turn more
        turns_ahead = self._turns_ahead
        for number in range(num_turns, num_turns + int(turns_ahead) + 1):
            following = None
            for kind in kinds:
                following = kind.mixed(number, following)
            if following is None:
                break
            size += self._blocks_per_token * following.num_tokens
            lasts *= following.probability
            sizes.append(lasts * size)
        return tuple(round(_between(sizes, share * turns_ahead)) for share in SHARES)

    @property
    def _turns_ahead(self) -> float:
        """Turns that a job has within the horizon, at most ``MAX_AHEAD``."""
        return min(self._horizon_s / self._period_s, MAX_AHEAD)

    def times_s(self) -> tuple[float, ...]:
        """How far ahead each of the expected numbers of blocks is."""
        horizon_s = self._turns_ahead * self._period_s if self._period_s else self._horizon_s
        return tuple(share * horizon_s for share in SHARES)

    # ---- what is learned ----

    def turn_ended(self, turn: Turn, now: float) -> None:
        """Learns how long a turn ends after the one that it continued."""
        if turn.tip is None:
            return
        weight = PERIOD_SMOOTHING if self._period_s else 1.0
        self._period_s += weight * (max(now - turn.tip.ended_s, 1e-3) - self._period_s)

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        """Counts a turn without a tool call as its job's last, until a turn follows."""
        if tip.is_answer and not tip.looks_last:
            tip.looks_last = True
            self._count_last(tip, 1)

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        if tip.looks_last:
            tip.looks_last = False
            self._count_last(tip, -1)
        num_tokens = max(0, turn.request.num_prompt_tokens - len(tip.chain) * self._block_size)
        for kind in self._kinds_of(tip.job):
            kind.turns(tip.turn_number).followed(num_tokens)

    def on_dropped(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        if end is not BranchEnd.CROWDED_OUT and tip.is_alone and not tip.looks_last:
            self._count_last(tip, 1)

    def _count_last(self, tip: BranchTip, count: int) -> None:
        for kind in self._kinds_of(tip.job):
            kind.turns(tip.turn_number).last(count)

    def _kinds_of(self, job: Job) -> Iterator[_Kind]:
        for name in _names(job):
            if name not in self._kinds and len(self._kinds) >= MAX_KINDS:
                self._kinds.popitem(last=False)
            yield self._kinds.setdefault(name, _Kind())
            self._kinds.move_to_end(name)


def _names(job: Job) -> Iterator[Hashable]:
    """The names under which a job's turns are counted, the most general first."""
    yield job.tenant
    name = kind_name(job)
    if name is not None:
        yield name


def _between(values: list[float], place: float) -> float:
    """The value at a place between two of a list; the last one beyond its end."""
    index = int(place)
    if index + 1 >= len(values):
        return values[-1]
    return values[index] + (place - index) * (values[index + 1] - values[index])

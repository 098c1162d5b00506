"""How contexts of jobs grow: the tokens that a turn adds, and whether another turn follows.

Jobs of one kind grow alike. Each mean of a kind is mixed with that of all its tenant's jobs, by the number of
its observations (Bühlmann's credibility, ASTIN Bulletin 4, 1967).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from estimator.kinds import Kind, forget_one

MAX_KINDS = 256
"""Maximum number of kinds; beyond it, one is forgotten (``forget_one``)."""
MAX_TURNS = 128
"""Jobs with more turns grow like jobs with this many."""
MAX_SEEN = 512.0
"""When this many turns of a number were seen, their counts are halved, so that old jobs count less."""
PRIOR_STRENGTH = 8.0
"""The mean of a tenant's jobs counts as much as this many observations of a kind."""
PERIOD_SMOOTHING = 0.02
"""Weight of a new turn in the mean time between the ends of a job's turns."""


class Next(NamedTuple):
    """What follows a turn: another one with this probability, which then adds this many tokens."""

    probability: float
    num_tokens: float


class TurnCounts:
    """What followed the turns of one number of jobs of one kind."""

    __slots__ = ("num_followed", "num_last", "num_tokens")

    def __init__(self, num_followed: float = 0.0, num_last: float = 0.0, num_tokens: float = 0.0) -> None:
        self.num_followed = num_followed
        self.num_last = num_last
        self.num_tokens = num_tokens

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


Counts = dict[int, TurnCounts]
"""Counts of a kind of jobs, by the number of the turn."""


def what_follows(counts: list[Counts], number: int) -> Next | None:
    """What follows the turn of this number, by the counts of kinds from the most general to the most special
    one; None if nothing is known."""
    number = min(number, MAX_TURNS)
    following = None
    for each in counts:
        turns = each.get(number)
        if turns is not None:
            following = turns.mixed(following)
    return following


class Growth:
    """What is counted of kinds of jobs."""

    def __init__(self) -> None:
        self.kinds: OrderedDict[Kind, Counts] = OrderedDict()
        """Counts of each kind, the least recently seen kind first."""
        self.period_s = 0.0
        """Mean time between the ends of a turn and of the next one; 0 before any turn followed one."""

    def counts_of(self, kind: Kind) -> list[Counts]:
        """What is known of such jobs, the most general first; see ``what_follows``."""
        return [self.kinds[each] for each in _levels(kind) if each in self.kinds]

    def turn_took(self, seconds: float) -> None:
        """Learns how long a turn ended after the one that it continued."""
        weight = PERIOD_SMOOTHING if self.period_s else 1.0
        self.period_s += weight * (max(seconds, 1e-3) - self.period_s)

    def followed(self, kind: Kind, number: int, num_tokens: int) -> None:
        """Counts a turn of this number that another one followed, which added this many tokens."""
        for turns in self._turns(kind, number):
            turns.followed(num_tokens)

    def last(self, kind: Kind, number: int, count: int = 1) -> None:
        """Counts a job that ended after the turn of this number; a ``count`` of -1 undoes that."""
        for turns in self._turns(kind, number):
            turns.last(count)

    def _turns(self, kind: Kind, number: int) -> Iterator[TurnCounts]:
        for each in _levels(kind):
            if each not in self.kinds and len(self.kinds) >= MAX_KINDS:
                forget_one(self.kinds)
            turns = self.kinds.setdefault(each, {})
            self.kinds.move_to_end(each)
            yield turns.setdefault(min(number, MAX_TURNS), TurnCounts())


def _levels(kind: Kind) -> Iterator[Kind]:
    """All jobs of the tenant, then those of the kind."""
    yield Kind(kind.tenant, None)
    if kind.beginning is not None:
        yield kind

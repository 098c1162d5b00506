"""What each tenant's calls and turns teach of that tenant's next ones, and what tenants lend each other.

A level between kinds of calls and jobs. Each tenant learns by itself. Other tenants lend it what
they know of a kind of call only once that improved the predictions of calls that tenants repeated,
and then at most one observation for each other tenant that knows the kind, however many calls that
tenant made: no tenant's calls alone decide for another. A tenant that has learned nothing yet is
lent by several others or by none. Turns are not lent. With one tenant, or none with a name, this
level is empty: everything learned is that tenant's own.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from estimator.credibility import Credibility, losses_of
from estimator.durations import NO_BELIEF, Belief, DurationEstimator
from estimator.learned.duration_model import DurationModel
from estimator.learned.work_model import WorkModel
from estimator.plain_math import halved
from estimator.survival import SurvivalCurve
from estimator.tool_key import ToolKey
from estimator.turn_outcomes import TurnOutcomes

LENT = (0.0, 1.0, 2.0, 4.0)
"""Choices for the largest number of observations that are lent; it is learned by kind of call."""
NUM_LENDERS_AT_FIRST = 3
"""The number of other tenants that must know a kind of call before a new tenant is lent it."""
MAX_TENANTS = 32
MAX_KEYS = 64
MAX_JOB_KEYS = 128
"""Maximum number of tenants, and of kinds of calls for each; the least recently seen are forgotten."""

Parts = tuple[str, ...]


@dataclass(slots=True)
class Learned:
    """Everything learned, of all tenants or of one; what is known of jobs does not survive a restart."""

    durations: DurationEstimator = field(default_factory=DurationEstimator)
    turns: TurnOutcomes = field(default_factory=TurnOutcomes)


class Tenants:
    """Learns from every tenant and answers for each; '' is the tenant of requests without one."""

    def __init__(self, of_all: Learned | None = None) -> None:
        """``of_all`` is what was learned of requests without a tenant, or of the only tenant."""
        self.of_all = of_all or Learned()
        self.only: str | None = None
        """The only tenant that anything was learned of."""
        self.own: OrderedDict[str, Learned] = OrderedDict()
        """Own observations by tenant, the least recently active first; empty while there is only
        one."""
        self.work_model: WorkModel | None = None
        """What was learned of jobs' remaining work, from all tenants: numbers, and names of tools."""
        self.duration_model: DurationModel | None = None
        """Likewise, of how the durations of calls are corrected."""
        self.credit: dict[Parts, Credibility] = {}
        """Credibility of what was lent, by kind of call: how well it predicted."""
        self._lent: dict[tuple[str, Parts], Belief] = {}
        """Cache of what the others know of a kind now."""
        self._stranger: Learned | None = None
        """The answer for a tenant of which nothing is known."""

    @property
    def durations(self) -> DurationEstimator:
        """Of all."""
        return self.of_all.durations

    @property
    def turns(self) -> TurnOutcomes:
        """Of all."""
        return self.of_all.turns

    def add(self, tenant: str, own: Learned) -> None:
        """Add a tenant with its restored state; the last one added counts as the most recently
        active."""
        self.own[tenant] = self._bounded(own)

    # ---- learning ----

    def observe(
        self, tenant: str, key: ToolKey, duration_s: float, censored: bool, job: str | None, now: float
    ) -> None:
        """Learn from a call that ended or was given up."""
        own = self._learns(tenant)
        if own is not None:
            if not censored:
                self._score(tenant, own.durations, key, duration_s)
            own.durations.observe(key, duration_s, censored, job=job, now=now)
            self._lent.clear()
        self.of_all.durations.observe(key, duration_s, censored, job=job, now=now)

    def observe_last(self, tenant: str, tools: Sequence[ToolKey]) -> None:
        """Learn that a turn that ended so was the last of its job."""
        own = self._learns(tenant)
        if own is not None:
            own.turns.observe_last(tools)
        self.of_all.turns.observe_last(tools)

    def observe_next(self, tenant: str, tools: Sequence[ToolKey], growth_tokens: int) -> None:
        """Learn that it was followed by a prompt that is longer by this many tokens."""
        own = self._learns(tenant)
        if own is not None:
            own.turns.observe_next(tools, growth_tokens)
        self.of_all.turns.observe_next(tools, growth_tokens)

    def _learns(self, tenant: str) -> Learned | None:
        """Where the tenant's own observations go; None if it is the only one."""
        if not self.own:
            if self.only in (None, tenant):
                self.only = tenant
                return None
            assert self.only is not None
            self.own[self.only] = self._bounded(deepcopy(self.of_all))
        own = self.own.get(tenant)
        if own is None:
            own = self.own[tenant] = self._nothing()
        self.own.move_to_end(tenant)
        if len(self.own) > MAX_TENANTS:
            self.own.popitem(last=False)
        return own

    def _nothing(self) -> Learned:
        """An empty state with the parameters of what all have learned."""
        durations = DurationEstimator(**self.of_all.durations.get_params())
        durations.start()
        turns = TurnOutcomes()
        self.of_all.turns.share_weights_with(turns)
        return self._bounded(Learned(durations, turns))

    @staticmethod
    def _bounded(learned: Learned) -> Learned:
        learned.durations.set_params(max_keys=MAX_KEYS, max_job_keys=MAX_JOB_KEYS)
        return learned

    def _score(self, tenant: str, own: DurationEstimator, key: ToolKey, duration_s: float) -> None:
        """Before a call is learned, score how well its tenant's own calls of its kind, with what
        others would have lent, would have predicted it."""
        weights, others = own.ended(key.parts), self._others(tenant, key.parts)
        if weights is None or not others.weight:
            return
        losses = losses_of(weights, others.masses, others.weight, own.bin_of(duration_s), LENT)
        for depth in range(len(key.parts) + 1):
            credit = self.credit.setdefault(key.parts[:depth], Credibility(LENT))
            credit.add(losses, halved(1 / own.half_life))
        if len(self.credit) > self.durations.max_keys:
            known = self.durations.kinds
            self.credit = {parts: credit for parts, credit in self.credit.items() if parts in known}

    # ---- answers ----

    def survival(self, tenant: str, key: ToolKey, job: str | None) -> SurvivalCurve:
        """How long such a call of this tenant takes."""
        if not self.own and self.only in (None, tenant):  # the only tenant; asked for each pin of a search
            return self.of_all.durations.survival(key, job)
        return self._own(tenant).durations.survival(key, job, _Lent(self, tenant))

    def turns_of(self, tenant: str) -> TurnOutcomes:
        """What follows this tenant's turns."""
        return self.turns if self._is_alone(tenant) else self._own(tenant).turns

    def _own(self, tenant: str) -> Learned:
        own = self.own.get(tenant)
        if own is None:
            own = self._stranger = self._stranger or self._nothing()
        return own

    def _is_alone(self, tenant: str) -> bool:
        return not self.own and self.only in (None, tenant)

    def lent(self, tenant: str, parts: Parts) -> tuple[Belief, float]:
        """What others lend a tenant of a kind of call: a belief, and the maximum number of
        observations."""
        strength = self._strength(parts)
        others = self._others(tenant, parts) if strength else NO_BELIEF
        if tenant not in self.own and others.weight < NUM_LENDERS_AT_FIRST:
            return NO_BELIEF, 0.0
        return others, min(strength, others.weight)

    def _others(self, tenant: str, parts: Parts) -> Belief:
        """The other tenants' belief about a kind, each with equal weight, and the number of tenants
        behind it."""
        found = self._lent.get((tenant, parts))
        if found is None:
            known = (each.durations for name, each in self.own.items() if name != tenant)
            beliefs = [durations.belief(parts) for durations in known if parts in durations.kinds]
            found = self._lent[tenant, parts] = _mean(beliefs)
        return found

    def _strength(self, parts: Parts) -> float:
        """The weight of what is lent, learned for the kind or for a parent with enough scores; 0
        before any."""
        for depth in range(len(parts), -1, -1):
            credit = self.credit.get(parts[:depth])
            strength = credit.strength(self.of_all.durations.min_judged) if credit is not None else None
            if strength is not None:
                return strength
        return 0.0


def _mean(beliefs: Sequence[Belief]) -> Belief:
    if not beliefs:
        return NO_BELIEF
    num = len(beliefs)
    masses = [math.fsum(column) / num for column in zip(*(each.masses for each in beliefs), strict=True)]
    return Belief(masses, math.fsum(each.tail for each in beliefs) / num, float(num))


@dataclass(frozen=True, slots=True)
class _Lent:
    """The lender for one tenant."""

    tenants: Tenants
    tenant: str

    def of(self, parts: Parts) -> tuple[Belief, float]:
        return self.tenants.lent(self.tenant, parts)

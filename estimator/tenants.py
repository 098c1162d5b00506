"""Learns each tenant's calls and turns separately; tenants lend each other beliefs about kinds of calls.

This is a level between kinds of calls and jobs. Other tenants lend a tenant their beliefs about a kind of
call only once that has improved the predictions of calls that tenants repeated. They lend at most one
observation for each other tenant that knows the kind, however many calls that tenant made: no single tenant's
calls decide for another. A tenant that has learned nothing yet borrows from several others or from none.
Turns are not lent. With one tenant, or none with a name, this level is empty: everything learned is that
tenant's own.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from estimator.credibility import Credibility, losses_of
from estimator.durations import NO_BELIEF, Belief, DurationEstimator
from estimator.growth import Growth
from estimator.learned.duration_model import DurationModel
from estimator.learned.work_model import WorkModel
from estimator.plain_math import halved
from estimator.survival import SurvivalCurve
from estimator.tool_key import ToolKey
from estimator.turn_outcomes import TurnOutcomes

LENT = (0.0, 1.0, 2.0, 4.0)
"""Candidates for the largest number of observations that are lent; the choice is learned by kind of call."""
NUM_LENDERS_AT_FIRST = 3
"""The number of other tenants that must know a kind of call before a new tenant may borrow it."""
MAX_TENANTS = 32
MAX_KEYS = 64
MAX_JOB_KEYS = 128
"""Maximum numbers of tenants, and of keys and jobs' keys for each; the least recently seen are forgotten."""

Parts = tuple[str, ...]


@dataclass(slots=True)
class Learned:
    """Everything learned, from all tenants or from one; what is known about jobs does not survive a
    restart."""

    durations: DurationEstimator = field(default_factory=DurationEstimator)
    turns: TurnOutcomes = field(default_factory=TurnOutcomes)


class Tenants:
    """Learns from every tenant and predicts for each; '' is the tenant of requests without one."""

    def __init__(self, of_all: Learned | None = None) -> None:
        """``of_all`` is what was learned from requests without a tenant, or from the only tenant."""
        self.of_all = of_all or Learned()
        self.only: str | None = None
        """The only tenant with observations; None before any."""
        self.own: OrderedDict[str, Learned] = OrderedDict()
        """Each tenant's own observations, the least recently active tenant first; empty while there is only
        one."""
        self.work_model: WorkModel | None = None
        """The model of jobs' remaining work, learned from all tenants: numbers, and names of tools."""
        self.growth = Growth()
        """How contexts grow, by kind of job; nothing of it is lent."""
        self.duration_model: DurationModel | None = None
        """The model that corrects the durations of calls, learned from all tenants."""
        self.credit: dict[Parts, Credibility] = {}
        """Credibility of lent beliefs, by kind of call: how well they predicted."""
        self._lent: dict[tuple[str, Parts], Belief] = {}
        """Cache of the other tenants' current belief about a kind."""
        self._stranger: Learned | None = None
        """The empty state used for every tenant without observations."""

    @property
    def durations(self) -> DurationEstimator:
        """The estimator of all tenants' durations."""
        return self.of_all.durations

    @property
    def turns(self) -> TurnOutcomes:
        """The outcomes of all tenants' turns."""
        return self.of_all.turns

    def add(self, tenant: str, own: Learned) -> None:
        """Adds a tenant with its restored state; the last one added counts as the most recently active."""
        self.own[tenant] = self._bounded(own)

    # ---- learning ----

    def observe(
        self, tenant: str, key: ToolKey, duration_s: float, censored: bool, job: str | None, now: float
    ) -> None:
        """Learns from a call that ended or was given up."""
        own = self._learns(tenant)
        if own is not None:
            if not censored:
                self._score(tenant, own.durations, key, duration_s)
            own.durations.observe(key, duration_s, censored, job=job, now=now)
            self._lent.clear()
        self.of_all.durations.observe(key, duration_s, censored, job=job, now=now)

    def observe_last(self, tenant: str, tools: Sequence[ToolKey]) -> None:
        """Learns that a turn that ended with these calls was the last of its job."""
        own = self._learns(tenant)
        if own is not None:
            own.turns.observe_last(tools)
        self.of_all.turns.observe_last(tools)

    def observe_next(self, tenant: str, tools: Sequence[ToolKey], growth_tokens: int) -> None:
        """Learns that such a turn was followed by a prompt that is longer by this many tokens."""
        own = self._learns(tenant)
        if own is not None:
            own.turns.observe_next(tools, growth_tokens)
        self.of_all.turns.observe_next(tools, growth_tokens)

    def _learns(self, tenant: str) -> Learned | None:
        """The state that receives the tenant's own observations; None if it is the only tenant."""
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
        """Returns an empty state with the parameters of ``of_all``."""
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
        """Scores how well the tenant's own calls of a kind, with what others would have lent, predict a call,
        before the call is learned."""
        weights = own.ended(key.parts)
        others = self._others(tenant, key.parts)
        if weights is None or not others.weight:
            return
        losses = losses_of(weights, others.masses, others.weight, own.bin_of(duration_s), LENT)
        for depth in range(len(key.parts) + 1):
            credit = self.credit.setdefault(key.parts[:depth], Credibility(LENT))
            credit.add(losses, halved(1 / own.half_life))
        if len(self.credit) > self.durations.max_keys:
            known = self.durations.kinds
            self.credit = {parts: credit for parts, credit in self.credit.items() if parts in known}

    # ---- predictions ----

    def survival(self, tenant: str, key: ToolKey, job: str | None) -> SurvivalCurve:
        """The curve of how long such a call of this tenant takes."""
        if not self.own and self.only in (None, tenant):  # the only tenant; called for each pin of a search
            return self.of_all.durations.survival(key, job)
        return self._own(tenant).durations.survival(key, job, _Lent(self, tenant))

    def turns_of(self, tenant: str) -> TurnOutcomes:
        """The outcomes of this tenant's turns."""
        return self.turns if self._is_alone(tenant) else self._own(tenant).turns

    def _own(self, tenant: str) -> Learned:
        own = self.own.get(tenant)
        if own is None:
            own = self._stranger = self._stranger or self._nothing()
        return own

    def _is_alone(self, tenant: str) -> bool:
        return not self.own and self.only in (None, tenant)

    def lent(self, tenant: str, parts: Parts) -> tuple[Belief, float]:
        """Returns what other tenants lend this tenant for a kind of call: a belief, and the maximum number of
        observations."""
        strength = self._strength(parts)
        others = self._others(tenant, parts) if strength else NO_BELIEF
        if tenant not in self.own and others.weight < NUM_LENDERS_AT_FIRST:
            return NO_BELIEF, 0.0
        return others, min(strength, others.weight)

    def _others(self, tenant: str, parts: Parts) -> Belief:
        """The other tenants' belief about a kind, each with equal weight; its weight is the number of these
        tenants."""
        found = self._lent.get((tenant, parts))
        if found is None:
            known = (each.durations for name, each in self.own.items() if name != tenant)
            beliefs = [durations.belief(parts) for durations in known if parts in durations.kinds]
            found = self._lent[tenant, parts] = _mean(beliefs)
        return found

    def _strength(self, parts: Parts) -> float:
        """The number of observations that may be lent, learned for the kind or for a parent with enough
        scores; 0 before."""
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

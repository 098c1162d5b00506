"""What each tenant's calls and turns teach of that tenant's next ones, and what tenants lend each other.

A level between kinds of calls and jobs. Each tenant learns by itself. Others lend it what they know of a kind
of call only once calls that tenants repeated were predicted the better for it, and then no more observations
than there are others who know the kind, however many calls those made: nobody's calls alone decide for
somebody else. Who has learned nothing yet is lent by several others, or by nobody. Turns are not lent.

While there is one tenant, or none with a name, there is nothing here: what all have learned is its own.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field

from estimator.credibility import Credibility, losses_of
from estimator.durations import NO_BELIEF, Belief, DurationEstimator
from estimator.plain_math import halved
from estimator.survival import SurvivalCurve
from estimator.tool_key import ToolKey
from estimator.turn_outcomes import TurnOutcomes

LENT = (0.0, 1.0, 2.0, 4.0)
"""So many observations may be lent at most; which, is learned by kind of call."""
NUM_LENDERS_AT_FIRST = 3
"""Others that must know a kind of call before who has learned nothing is told of it."""
MAX_TENANTS = 32
MAX_KEYS = 64
MAX_JOB_KEYS = 128
"""Tenants, and kinds of calls of each, that are told apart; those seen least recently are forgotten."""

Parts = tuple[str, ...]


@dataclass(slots=True)
class Learned:
    """All that is learned, of all or of one tenant; what is known of jobs does not survive a restart."""

    durations: DurationEstimator = field(default_factory=DurationEstimator)
    turns: TurnOutcomes = field(default_factory=TurnOutcomes)


class Tenants:
    """Learns from every tenant and answers each; '' is the tenant of those whom nobody names."""

    def __init__(self, of_all: Learned | None = None) -> None:
        """``of_all``: what was learned of whom nobody knows, or of the only tenant that comes."""
        self.of_all = of_all or Learned()
        self.only: str | None = None
        """The only tenant that anything was learned of."""
        self.own: OrderedDict[str, Learned] = OrderedDict()
        """By tenant, the one heard of least recently first; empty while there is only one."""
        self.credit: dict[Parts, Credibility] = {}
        """By kind of call: how well what was lent predicted."""
        self._lent: dict[tuple[str, Parts], Belief] = {}
        """As others know kinds now."""
        self._stranger: Learned | None = None
        """Of whom nothing is known."""

    @property
    def durations(self) -> DurationEstimator:
        """Of all."""
        return self.of_all.durations

    @property
    def turns(self) -> TurnOutcomes:
        """Of all."""
        return self.of_all.turns

    def add(self, tenant: str, own: Learned) -> None:
        """One whose own lessons were kept; the last is the one heard of last."""
        self.own[tenant] = self._bounded(own)

    # ---- learning ----

    def observe(
        self, tenant: str, key: ToolKey, duration_s: float, censored: bool, job: str | None, now: float
    ) -> None:
        """A call was over, or was given up."""
        own = self._learns(tenant)
        if own is not None:
            if not censored:
                self._judge(tenant, own.durations, key, duration_s)
            own.durations.observe(key, duration_s, censored, job=job, now=now)
            self._lent.clear()
        self.of_all.durations.observe(key, duration_s, censored, job=job, now=now)

    def observe_last(self, tenant: str, tools: Sequence[ToolKey]) -> None:
        """A turn that ended so was the last of its job."""
        own = self._learns(tenant)
        if own is not None:
            own.turns.observe_last(tools)
        self.of_all.turns.observe_last(tools)

    def observe_next(self, tenant: str, tools: Sequence[ToolKey], growth_tokens: int) -> None:
        """It was followed by a prompt so much longer."""
        own = self._learns(tenant)
        if own is not None:
            own.turns.observe_next(tools, growth_tokens)
        self.of_all.turns.observe_next(tools, growth_tokens)

    def _learns(self, tenant: str) -> Learned | None:
        """Where the tenant's own lessons go; None: it is the only one."""
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
        """Weighed as what all have learned is."""
        durations = DurationEstimator(**self.of_all.durations.get_params())
        durations.start()
        turns = TurnOutcomes()
        self.of_all.turns.weigh_alike(turns)
        return self._bounded(Learned(durations, turns))

    @staticmethod
    def _bounded(learned: Learned) -> Learned:
        learned.durations.set_params(max_keys=MAX_KEYS, max_job_keys=MAX_JOB_KEYS)
        return learned

    def _judge(self, tenant: str, own: DurationEstimator, key: ToolKey, duration_s: float) -> None:
        """Before a call is learned: how well would its tenant's own calls of its kind have predicted it, with
        what others would have lent?"""
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
        if not self.own and self.only in (None, tenant):  # alone; asked for each pin of a search
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
        """What others lend a tenant of a kind of call: a belief, and observations of it at most."""
        strength = self._strength(parts)
        others = self._others(tenant, parts) if strength else NO_BELIEF
        if tenant not in self.own and others.weight < NUM_LENDERS_AT_FIRST:
            return NO_BELIEF, 0.0
        return others, min(strength, others.weight)

    def _others(self, tenant: str, parts: Parts) -> Belief:
        """What the other tenants believe of a kind, each as much as any; it rests on so many."""
        found = self._lent.get((tenant, parts))
        if found is None:
            known = (each.durations for name, each in self.own.items() if name != tenant)
            beliefs = [durations.belief(parts) for durations in known if parts in durations.kinds]
            found = self._lent[tenant, parts] = _mean(beliefs)
        return found

    def _strength(self, parts: Parts) -> float:
        """By the credit of the kind, or of a parent judged often; 0 before any was."""
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
    """To one tenant."""

    tenants: Tenants
    tenant: str

    def of(self, parts: Parts) -> tuple[Belief, float]:
        return self.tenants.lent(self.tenant, parts)

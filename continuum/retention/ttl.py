"""How long to retain a branch tip: one pure function per rule.

Every rule decides until when, counted from the end of the turn, the KV blocks of a turn in a tool call are
worth keeping.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

from continuum.config import ContinuumConfig
from estimator.plain_math import log
from estimator.survival import SurvivalCurve

HARDLY_EVER = 0.1
"""Share of answers that a turn follows soon, below which answers are not held."""


@dataclass(frozen=True, slots=True)
class TtlInputs:
    """The inputs of a rule."""

    curve: SurvivalCurve
    """Time until the tools return, counted from the end of the turn; without support before any call was seen
    to end."""
    global_curve: SurvivalCurve
    """The same curve over all tools."""
    num_blocks: int
    """Number of blocks of the pool that a pin of the tip holds."""
    prefill_s: float
    """Seconds to recompute the tip."""
    queue_delay_s: float
    """Mean wait of turns whose KV was not retained: the wait that a pin saves its turn."""
    memoryfulness: float
    """How well a job's age predicts its remaining turns: 1 exactly, 0 not at all."""
    called_tools: bool
    """False for a turn that ended with an answer."""
    pool_share: float = 0.0
    """These blocks as a share of the pool."""
    reload_s: float | None = None
    """Seconds to load the tip back from host memory; None where nothing is offloaded."""
    last_probability: float = 0.0
    """Probability that no turn will follow."""
    answer_return: float | None = None
    """Share of the turns without a tool call that another turn followed within ``answer_ttl_s``; None while
    unknown."""
    has_plain_tool: bool = True
    """``fork`` rule: the turn called just one tool, or its calls are not known yet."""
    plain_mean_s: float | None = None
    """``fork`` rule: mean time until turns with the same call returned; None before any returned."""


@dataclass(frozen=True, slots=True)
class TtlDecision:
    """How long to pin, and why: ``ttl_s`` seconds from the end of the turn (0: unpin), and the reason in a
    few words."""

    ttl_s: float
    reason: str
    is_final: bool = False
    """Unpin at the turn's end, without a grace: learning which tools run would not change the decision."""


class TtlRule(Protocol):
    """A rule that decides how long to pin."""

    def choose_ttl(self, inputs: TtlInputs) -> TtlDecision: ...


def unpin_if_offloaded(inputs: TtlInputs, share: float) -> TtlDecision | None:
    """Returns the decision to unpin if the offloaded copy loads in less than ``share`` of the recomputation
    time; else None."""
    if inputs.reload_s is None or inputs.reload_s >= share * inputs.prefill_s:
        return None
    return TtlDecision(0.0, "its copy is loaded back for less than holding it would cost", is_final=True)


def at_least_as_asked(
    decision: TtlDecision, inputs: TtlInputs, asked_s: float, *, pool_price: float, max_ttl_s: float
) -> TtlDecision:
    """Returns the decision, with the lifetime that the client requested as its lower bound.

    A client that requests a lifetime announces its return, so holding may cost up to all that its return
    saves (as in ``PriceRule``), and no more. An offloaded copy that is just as good is used instead. Seconds
    count from the end of the turn.
    """
    if decision.is_final:
        return decision
    worth_s = _break_even_s(_spared_s(inputs), pool_price * inputs.pool_share)
    floor_s = min(asked_s, worth_s, max_ttl_s)
    if floor_s <= decision.ttl_s:
        return decision
    if floor_s == asked_s:
        return TtlDecision(floor_s, "its client asked for as long")
    limit = "than it is worth" if floor_s == worth_s else "than any pin lasts"
    return TtlDecision(floor_s, f"its client asked for longer {limit}")


def _after_answer(inputs: TtlInputs, answer_ttl_s: float) -> TtlDecision:
    """How long to pin a turn without a tool call, while no such turn's return is known: ``answer_ttl_s``,
    unless turns hardly ever follow within that time."""
    if inputs.answer_return is not None and inputs.answer_return < HARDLY_EVER:
        return TtlDecision(0.0, "no tool call: turns hardly ever follow such a turn soon")
    return TtlDecision(answer_ttl_s, "no tool call: probably the last turn")


def _spared_s(inputs: TtlInputs) -> float:
    """Device seconds saved by a return that finds its KV: those of the load or of the recomputation."""
    return inputs.prefill_s if inputs.reload_s is None else inputs.reload_s


def _break_even_s(spared_s: float, cost_per_s: float) -> float:
    """Seconds until holding has cost as much as it can save."""
    return spared_s / max(cost_per_s, 1e-9)


@dataclass(frozen=True, slots=True)
class PriceRule:
    """Retains for the most valuable time: the τ that maximizes P(D <= τ)·B - λ·m·E[min(D, τ)]; zero if
    loading an offloaded copy is cheap.

    B is the device time saved by a return that finds its KV: its recomputation, or its load if there is an
    offloaded copy. m blocks of N held for a second are m/N seconds of the whole pool; while memory is short
    such a second is worth ``pool_price`` seconds of the device: λ = price/N. While memory is not short an
    expired tip stays cached, so unpinning costs nothing and the same τ is valid.

    If nothing is learned (at first, and beyond the longest call seen), a tip is retained until holding has
    cost as much as it can save, which is never more than twice the best in hindsight (the ski-rental rule:
    Karlin et al., Algorithmica 1994).
    """

    answer_ttl_s: float
    pool_price: float
    cheap_reload_share: float

    def choose_ttl(self, inputs: TtlInputs) -> TtlDecision:
        if (copied := unpin_if_offloaded(inputs, self.cheap_reload_share)) is not None:
            return copied
        spared_s = _spared_s(inputs) * (1 - inputs.last_probability)
        cost_per_s = self.pool_price * inputs.pool_share
        break_even_s = _break_even_s(spared_s, cost_per_s)
        curve = inputs.curve
        if not curve.support:
            if not inputs.called_tools:
                decision = _after_answer(inputs, self.answer_ttl_s)
                return replace(decision, ttl_s=min(decision.ttl_s, break_even_s))
            return TtlDecision(
                break_even_s, "nothing learned of this tool yet: until holding has cost its worth"
            )
        best_s = 0.0
        best_worth_s = 0.0
        for until_s, returned in zip(curve.edges_s, curve.probabilities, strict=True):
            worth_s = returned * spared_s - cost_per_s * curve.expected_min(until_s)
            if worth_s > best_worth_s:
                best_s = until_s
                best_worth_s = worth_s
        if best_s == 0.0:
            return TtlDecision(0.0, "holding costs more than it spares")
        if best_s >= curve.support[-1]:
            return TtlDecision(best_s + break_even_s, "until past the longest call seen")
        return TtlDecision(best_s, "for as long as is worth the most")


@dataclass(frozen=True, slots=True)
class MedianHorizonRule:
    """Retains while the median of the remaining time is at most a horizon; not at all if loading an offloaded
    copy is cheap.

    The time is limited to a multiple of the time in which nine of ten such calls return: beyond that, the
    curve is borrowed from other kinds of calls and would treat all kinds alike. While nothing is learned, the
    time is a constant. A call that runs longer than the longest duration seen is as unknown as one that was
    never seen, so the same constant is added.
    """

    horizon_s: float
    cold_horizon_s: float
    answer_ttl_s: float
    cheap_reload_share: float
    usual_share: float
    past_usual: float

    def choose_ttl(self, inputs: TtlInputs) -> TtlDecision:
        if (copied := unpin_if_offloaded(inputs, self.cheap_reload_share)) is not None:
            return copied
        curve = inputs.curve
        if not curve.support:
            if not inputs.called_tools:
                return _after_answer(inputs, self.answer_ttl_s)
            return TtlDecision(self.cold_horizon_s, "nothing learned of this tool yet")
        if curve.median_remaining(0.0) > self.horizon_s:
            return TtlDecision(0.0, "median time to return is beyond the horizon")
        usual_s = self.past_usual * curve.quantile(self.usual_share)
        for elapsed_s in curve.support:
            if elapsed_s > usual_s:
                return TtlDecision(usual_s, "until well past when nearly all such calls are back")
            remaining_s = curve.median_remaining(elapsed_s)
            if math.isinf(remaining_s):
                return TtlDecision(elapsed_s + self.cold_horizon_s, "until past the longest call seen")
            if remaining_s > self.horizon_s:
                return TtlDecision(elapsed_s, "until the median remaining time passes the horizon")
        return TtlDecision(curve.support[-1] + self.cold_horizon_s, "until past the longest call seen")


@dataclass(frozen=True, slots=True)
class FixedRule:
    """Always retains for the same time."""

    ttl_s: float

    def choose_ttl(self, inputs: TtlInputs) -> TtlDecision:
        return TtlDecision(self.ttl_s, "fixed")


@dataclass(frozen=True, slots=True)
class ForkRule:
    """The preview fork's rule: 2 s if the tool's mean gap is at most 2 s or unknown, else nothing.

    A turn with no tool call, or with several, is not pinned: the fork saw no tool in it.
    """

    threshold_s: float = 2.0
    """FIXED_THRESHOLD_CONTINUUM: the longest mean gap that is worth a pin, and the length of every pin."""

    def choose_ttl(self, inputs: TtlInputs) -> TtlDecision:
        return self.decide(inputs.plain_mean_s, has_tool=inputs.has_plain_tool)

    def decide(self, mean_s: float | None, *, has_tool: bool) -> TtlDecision:
        """``mean_s`` is the mean of the gaps after this tool, from ``MeanGaps``."""
        if not has_tool:
            return TtlDecision(0.0, "no tool call, or several")
        if mean_s is None:
            return TtlDecision(self.threshold_s, "tool not seen yet")
        if mean_s <= self.threshold_s:
            return TtlDecision(self.threshold_s, "mean gap within the threshold")
        return TtlDecision(0.0, "mean gap beyond the threshold")


@dataclass(frozen=True, slots=True)
class PaperRule:
    """The Continuum paper's rule (arXiv 2511.02230): argmax over τ of P(D <= τ)(T̄·η + PrefillReload) − τ.

    Candidates are 0 and every duration seen. The cold start has three levels with K = 100. Up to K
    observations in all, durations are assumed to be Exp(1 s) with η = 1, whose optimum is ln B for B > 1 s.
    Up to K observations of this tool, the curve of all tools is used; else the tool's own. PrefillReload is
    the load time if blocks are offloaded.
    """

    min_observations: int = 100

    def choose_ttl(self, inputs: TtlInputs) -> TtlDecision:
        restore_s = inputs.prefill_s if inputs.reload_s is None else inputs.reload_s
        if inputs.global_curve.num_observations <= self.min_observations:
            benefit_s = inputs.queue_delay_s + restore_s
            return TtlDecision(log(benefit_s) if benefit_s > 1 else 0.0, "cold start: Exp(1 s)")
        own = inputs.curve.num_observations > self.min_observations
        curve = inputs.curve if own else inputs.global_curve
        benefit_s = inputs.queue_delay_s * inputs.memoryfulness + restore_s
        worth = -math.inf
        best_s = 0.0
        for until_s, returned in zip(curve.edges_s, curve.probabilities, strict=True):
            if returned * benefit_s - until_s > worth:  # the first of equally good ones
                worth = returned * benefit_s - until_s
                best_s = until_s
        return TtlDecision(best_s, "argmax over the tool's curve" if own else "argmax over all tools' curve")


def make_rule(config: ContinuumConfig) -> TtlRule:
    """Returns the rule that the configuration names."""
    rules: dict[str, TtlRule] = {
        "price": PriceRule(config.answer_ttl_s, config.pool_price, config.cheap_reload_share),
        "median-horizon": MedianHorizonRule(
            config.horizon_s,
            config.cold_horizon_s,
            config.answer_ttl_s,
            config.cheap_reload_share,
            config.usual_share,
            config.past_usual,
        ),
        "fixed": FixedRule(config.fixed_ttl_s),
        "fork": ForkRule(),
        "paper": PaperRule(),
    }
    return rules[config.ttl_rule]

"""Decides whether a published multiple is reproduced, and if not, names the cause that the runs show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from eval.report.figures import seconds
from eval.report.intervals import Estimate
from eval.reproduction.experiment import Behaviour, Point
from eval.reproduction.observed_rule import RetentionTimes
from eval.reproduction.published import BASELINE, IN_THAT_ORDER, NEAR, OURS, RULE, UNLIKE

NO_DIFFERENCE = 1.05
"""A published multiple within this factor of 1 means practically no difference."""
MOST = 0.5
"""Shares from this on count as the usual case."""
LEAST_SPARED = 0.005
"""Smallest share of prompt tokens saved that is reported; less would print as 0 %."""


class Verdict(Enum):
    """Our multiple compared with the published one."""

    REPRODUCED = "reproduced"
    MORE = "more"
    LESS = "less"
    UNDECIDED = "undecided"
    """Outside the tolerance, but the interval over seeds contains the published multiple."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One published multiple compared with ours."""

    verdict: Verdict
    reason: str | None
    """None if the multiple is reproduced."""
    is_open: bool = False
    """The multiple is reproduced, but its interval over seeds also contains 1, unlike what was published."""


def verdict_of(published: float, ours: Estimate, tolerance: float) -> Verdict:
    """Returns Reproduced within the factor ``tolerance`` of the published multiple.

    Of a published difference (beyond NO_DIFFERENCE), at least half must be reproduced, in logarithms:
    otherwise 1.0 would pass for 1.15.
    """
    wanted = math.log(published)
    found = math.log(ours.value)
    is_near = abs(found - wanted) <= math.log(tolerance)
    is_there = abs(wanted) <= math.log(NO_DIFFERENCE) or found * math.copysign(1, wanted) >= abs(wanted) / 2
    if is_near and is_there:
        return Verdict.REPRODUCED
    if ours.low is not None and ours.high is not None and ours.low <= published <= ours.high:
        return Verdict.UNDECIDED
    return Verdict.MORE if found > wanted else Verdict.LESS


def outcome(point: Point, policy: str, tolerance: float, base: str = BASELINE) -> Outcome | None:
    """Returns the outcome for the gain of ``policy`` over ``base``; None if it was not published."""
    published = point.setting.multiple(policy, base)
    if published is None or policy == OURS:
        return None
    ours = point.multiple(policy, base)
    verdict = verdict_of(published, ours, tolerance)
    if verdict is Verdict.REPRODUCED:
        is_open = ours.low is not None and ours.high is not None and ours.low <= 1 <= ours.high
        return Outcome(verdict, None, is_open and abs(math.log(published)) > math.log(NO_DIFFERENCE))
    return Outcome(verdict, f"{_cause(point, policy, base, verdict)}; {_seconds(point, base)}")


def _cause(point: Point, policy: str, base: str, verdict: Verdict) -> str:
    """Returns the likely cause, with the figures of the runs that show it."""
    if not point.behaviour(BASELINE).is_pressed:
        return _not_short(point)
    before = point.behaviour(base)
    own = point.behaviour(policy)
    published = point.setting.multiple(policy, base)
    assert published is not None
    order = _order_alone(point, policy) if base == BASELINE else None
    causes = [] if order is None else [order]
    if verdict is Verdict.UNDECIDED:
        causes.append("the interval over seeds contains the published multiple too")
    elif verdict is Verdict.LESS:
        causes += _why_less(point, policy, base, published)
    elif published < 1 / NO_DIFFERENCE:
        causes.append(_no_loss(policy, base, before, own))
    else:
        causes.append(f"{_spares(policy, base, before, own)} (no such share is published)")
    if policy in UNLIKE and verdict is not Verdict.UNDECIDED:
        causes.append(UNLIKE[policy])
    return "; ".join([*causes, _told(base, before), _told(policy, own)])


def _seconds(point: Point, base: str) -> str:
    """Returns the delays here and as published, which show how loaded each machine is."""
    ours = f"{base} takes {seconds(point.seconds(base).value)} s here"
    system = point.setting.system(base)
    if system is None or system.seconds is None:
        return ours
    return f"{ours}, {system.system} took {system.seconds:,g} s"


def _not_short(point: Point) -> str:
    told = _told(BASELINE, point.behaviour(BASELINE))
    use = point.pool_use()
    held = (
        "" if use is None else f", running requests use {use.mean:.0%} of the pool ({use.most:.0%} at most)"
    )
    return (
        f"memory is not short here: {told}{held}, so no policy can save anything; what filled the "
        "published machine at this load (output tokens, number of programs, speed) is not published"
    )


def _order_alone(point: Point, policy: str) -> str | None:
    """Returns the part of a gain that the order alone makes; None if no run shows it."""
    if policy not in IN_THAT_ORDER or point.order_alone is None:
        return None
    alone, whole = (point.first_multiple(run) for run in (point.order_alone, point.runs[policy][0]))
    return f"the order of programs alone gains {alone:.2f}x, {policy} {whole:.2f}x with the first seed"


def _why_less(point: Point, policy: str, base: str, published: float) -> list[str]:
    causes = []
    best = max(point.runs, key=lambda one: point.multiple(one, base).value)
    most = point.multiple(best, base).value
    if most * NEAR < published:
        causes.append(f"no policy here gains as much; {best} gains the most, {most:.2f}x")
    return [*causes, _own_cause(point, policy, base)]


def _own_cause(point: Point, policy: str, base: str) -> str:
    """Describes what a policy did that gained less than published."""
    own = point.behaviour(policy)
    held = point.retention_times
    if policy == RULE and held is not None and held.zero_share >= MOST:
        return _unpins_at_once(held)
    if not own.pin_shares:
        return _spares(policy, base, point.behaviour(base), own)
    last = f"{own.last_share:.0%} of turns are the last of a job"
    lost = f"{_lost(own):.0%} of {policy}'s pins end before the turn comes back ({_pins(own)}; {last})"
    before = point.behaviour(base)
    return f"{lost}, of {base}'s {_lost(before):.0%} ({_pins(before)})" if before.pin_shares else lost


def _lost(behaviour: Behaviour) -> float:
    return behaviour.pin_shares.get("revoked", 0.0) + behaviour.pin_shares.get("expired", 0.0)


def _unpins_at_once(held: RetentionTimes) -> str:
    return (
        f"the published rule unpins at once after {held.zero_share:.0%} of tool calls (mean time to live "
        f"{held.mean_ttl_s:.2f} s, from a prefill or reload of {held.mean_prefill_or_reload_s:.2f} s "
        f"and a queue delay of {held.mean_queue_delay_s:.1f} s)"
    )


def _spares(policy: str, base: str, before: Behaviour, own: Behaviour) -> str:
    spared = before.recomputed_share + before.loaded_share - own.recomputed_share - own.loaded_share
    if spared >= LEAST_SPARED:
        return f"{policy} recomputes or loads back {spared:.0%} of all prompt tokens less than {base}"
    return f"{policy} recomputes no fewer prompt tokens than {base}: only its order makes a difference"


def _no_loss(policy: str, base: str, before: Behaviour, own: Behaviour) -> str:
    return (
        f"the published loss is not seen ({policy} preempts {own.preemptions_per_turn:.2f} times a turn, "
        f"{base} {before.preemptions_per_turn:.2f})"
    )


def _told(policy: str, behaviour: Behaviour) -> str:
    loaded = f" and loads back {behaviour.loaded_share:.0%}" if behaviour.loaded_share else ""
    return (
        f"{policy} recomputes {behaviour.recomputed_share:.0%} of prompt tokens{loaded}, "
        f"the mean TTFT of returning turns is {behaviour.return_s:.1f} s"
    )


def _pins(behaviour: Behaviour) -> str:
    shares = behaviour.pin_shares.items()
    return ", ".join(f"{share:.0%} {cause.replace('_', ' ')}" for cause, share in shares)

"""Whether a published multiple comes out, and if not, why: rules over what the runs themselves show."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from eval.intervals import Estimate
from eval.reproduction.experiment import Behaviour, Point
from eval.reproduction.observed_rule import HoldTimes
from eval.reproduction.published import BASELINE, OURS, RULE

NO_DIFFERENCE = 1.05
"""A published multiple within this factor of 1 says that there is next to no difference."""
MOST = 0.5
"""A share from which on something counts as the usual case."""


class Verdict(Enum):
    """Of a multiple here beside the published one."""

    COMES_OUT = "comes out"
    MORE = "more"
    LESS = "less"
    UNDECIDED = "undecided"
    """Outside the tolerance, but the interval over seeds holds the published multiple."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One published multiple beside ours."""

    verdict: Verdict
    reason: str | None
    """None if it comes out."""


def judge(published: float, ours: Estimate, tolerance: float) -> Verdict:
    """Within the factor ``tolerance`` of the published multiple.

    A published difference (beyond NO_DIFFERENCE) must also be there by half, in logarithms: else 1.0 would
    pass for 1.15.
    """
    wanted, found = math.log(published), math.log(ours.value)
    is_near = abs(found - wanted) <= math.log(tolerance)
    is_there = abs(wanted) <= math.log(NO_DIFFERENCE) or found * math.copysign(1, wanted) >= abs(wanted) / 2
    if is_near and is_there:
        return Verdict.COMES_OUT
    if ours.low is not None and ours.high is not None and ours.low <= published <= ours.high:
        return Verdict.UNDECIDED
    return Verdict.MORE if found > wanted else Verdict.LESS


def outcome(point: Point, policy: str, tolerance: float) -> Outcome | None:
    """None where nothing was published."""
    published = point.setting.multiple(policy)
    if published is None or policy == OURS:
        return None
    verdict = judge(published, point.multiple(policy), tolerance)
    if verdict is Verdict.COMES_OUT:
        return Outcome(verdict, None)
    return Outcome(verdict, _reason(point, policy, verdict, is_loss=published < 1))


def _reason(point: Point, policy: str, verdict: Verdict, *, is_loss: bool) -> str:
    """``is_loss``: the policy was published as slower than the baseline."""
    base, own = point.baseline_beside(policy), point.behaviour(policy)
    if not base.is_pressed:
        return (
            f"memory is not short here: {_told(BASELINE, base)}, so no policy has anything to spare. What "
            "filled the published machine at this load (output tokens, number of programs) is not published"
        )
    beside = f"{_told(BASELINE, base)}; {_told(policy, own)}"
    if verdict is Verdict.UNDECIDED:
        return f"the interval over seeds is too wide to tell: {beside}"
    if verdict is Verdict.LESS:
        return f"{_why_less(point, policy, own)}: {beside}"
    return f"{_no_loss(policy, base, own) if is_loss else _why_more(base, own)}: {beside}"


def _why_less(point: Point, policy: str, own: Behaviour) -> str:
    if policy == RULE and point.hold_times is not None and point.hold_times.zero_share >= MOST:
        return _lets_go(point.hold_times)
    if not own.pin_shares:
        return f"{policy} holds nothing"
    causes = {
        "broken": "pins are broken for other turns before their own comes back",
        "expired": "pins expire before the turn comes back",
    }
    cause = max(causes, key=lambda cause: own.pin_shares.get(cause, 0.0))
    share = own.pin_shares.get(cause, 0.0)
    if share < MOST:
        return f"no one cause: {_pins(own)}"
    return f"{causes[cause]} ({share:.0%} of {policy}'s pins)"


def _lets_go(held: HoldTimes) -> str:
    return (
        f"the published rule lets go at once after {held.zero_share:.0%} of tool calls (mean hold "
        f"{held.mean_ttl_s:.2f} s; it goes by a prefill or reload of {held.mean_prefill_or_reload_s:.2f} s "
        f"and a queue delay of {held.mean_queue_delay_s:.1f} s)"
    )


def _why_more(base: Behaviour, own: Behaviour) -> str:
    spared = base.again_share + base.loaded_share - own.again_share - own.loaded_share
    if spared > 0:
        return f"it spares {spared:.0%} of all prompt tokens; no such share is published to compare with"
    return "it spares no prompt tokens: its order alone makes the difference"


def _no_loss(policy: str, base: Behaviour, own: Behaviour) -> str:
    return (
        f"the published loss does not show ({policy} preempts {own.preemptions_per_turn:.2f} times a turn, "
        f"{BASELINE} {base.preemptions_per_turn:.2f})"
    )


def _told(policy: str, behaviour: Behaviour) -> str:
    loaded = f" and loads back {behaviour.loaded_share:.0%}" if behaviour.loaded_share else ""
    return (
        f"{policy} computes {behaviour.again_share:.0%} of prompt tokens again{loaded}, "
        f"a returning turn's first token takes {behaviour.return_s:.1f} s"
    )


def _pins(behaviour: Behaviour) -> str:
    told = (f"{share:.0%} {cause.replace('_', ' ')}" for cause, share in behaviour.pin_shares.items())
    return f"pins {', '.join(told)}"

"""The parts of the agent policy, each defined as the policy that lacks it. Runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from benchmarks.policy.cell import Cell, grid_ratio, mean_jct_s, tier_ratio
from benchmarks.policy.promises import SUBJECT
from continuum.config import ContinuumConfig
from eval.baselines.catalog import policy_names
from eval.baselines.without import WITHOUT
from eval.report.intervals import Estimate

NOT_PLAYED = ("infer_jobs",)
"""Options without effect here: replayed jobs always have a name."""
HOLDS = {
    "price": "held for as long as is worth the most at a price of memory",
    "median-horizon": "held while the median of the remaining time is within a horizon",
    "fixed": "held for a constant time, whatever was learned of the tool",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part, described by what is left without it."""

    policy: str
    """The policy without the part, as a command line names it."""
    told: str


def parts() -> list[Part]:
    """Returns all parts; finds boolean options by itself."""
    summaries = dict(policy_names())
    lessened = [Part(kind.name, summaries[kind.name].removeprefix("as continuum, but ")) for kind in WITHOUT]
    return [
        *lessened,
        Part(f"{SUBJECT}:pin_budget=0", "nothing is held"),
        *_other_rules(),
        Part(
            f"{SUBJECT}:max_wait_s=inf,max_return_wait_s=inf",
            "however long somebody waits, it gives no right",
        ),
        Part(f"{SUBJECT}:max_return_wait_s=inf", "jobs that have begun wait no less than new ones"),
        *_weights(),
        *_switches(),
    ]


def _other_rules() -> list[Part]:
    """Returns the other rules for the pin's duration, each in place of the default."""
    return [
        Part(f"{SUBJECT}:ttl_rule={rule}", told)
        for rule, told in HOLDS.items()
        if rule != ContinuumConfig().ttl_rule
    ]


def _weights() -> list[Part]:
    """Returns the policy with a weight of 0; nothing if the weight is 0 by default."""
    if not ContinuumConfig().work_weight:
        return []
    return [Part(f"{SUBJECT}:work_weight=0", "the forecast of a job's remaining work counts nothing")]


def _switches() -> list[Part]:
    """Returns the policy with each boolean option inverted."""
    switches = [one for one in fields(ContinuumConfig) if isinstance(one.default, bool)]
    return [
        Part(
            f"{SUBJECT}:{one.name}={'false' if one.default else 'true'}",
            f"the option {one.name} is {'off' if one.default else 'on'}",
        )
        for one in switches
        if one.name not in NOT_PLAYED
    ]


def host_tier_ratio(cells: Sequence[Cell]) -> Estimate | None:
    """Returns the policy's mean JCT with a host tier over that without; None unless both tiers ran."""
    return tier_ratio(cells, SUBJECT)


def is_same(cells: Sequence[Cell], policy: str, base: str = SUBJECT) -> bool:
    """Whether all runs have the mean JCT that they have under ``base``: no decision differed."""
    return all(
        mean_jct_s(one) == mean_jct_s(other)
        for cell in cells
        for one, other in zip(cell.runs[policy], cell.runs[base], strict=True)
    )


def verdict(cells: Sequence[Cell], policy: str) -> str:
    """Returns the effect of the part that ``policy`` lacks, on the grid's mean."""
    if is_same(cells, policy):
        return "makes no difference"
    ratio = grid_ratio(cells, policy, SUBJECT)
    change = f"{abs(ratio.value - 1):.1%}"
    if ratio.low is None or ratio.high is None:
        return f"{'brings' if ratio.value > 1 else 'costs'} {change}, of one seed"
    if ratio.low > 1:
        return f"brings {change}"
    if ratio.high < 1:
        return f"COSTS {change}"
    return "neither brings nor costs what seeds could tell apart"

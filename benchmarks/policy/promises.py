"""The agent policy's promises on the grid, and whether it keeps them. A figure decides, not its interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.policy.cell import (
    BASELINE,
    Cell,
    Measure,
    grid_ratio,
    max_jct_s,
    mean_jct_s,
    p99_jct_s,
    returning_p99_s,
)
from eval.report.intervals import Estimate

SUBJECT = "continuum"
ORACLE = "oracle"
LIMITS = (ORACLE, "known-work")
"""Policies that know the future; they are no baselines."""
DIGITS = 3
"""Ratios are compared to a tenth of a percent: smaller differences are chance."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One promise and its result."""

    text: str
    kept: bool | None
    """Whether it is kept; None if no cell that ran can show it."""
    figure: str


@dataclass(frozen=True, slots=True)
class _Bound:
    """A promise about each cell of some kind."""

    text: str
    measure: Measure
    most: float
    """The largest ratio to fcfs that keeps the promise."""
    concerns: Callable[[Cell], bool]


def _any(cell: Cell) -> bool:
    return True


def _short(kind: str) -> Callable[[Cell], bool]:
    """Selects cells of these workloads without a host tier where memory is short."""
    return lambda cell: cell.traffic.startswith(kind) and not cell.host_tier and cell.is_short


_BOUNDS = (
    _Bound("mean JCT in no cell more than 1 % worse than fcfs on equal tiers", mean_jct_s, 1.01, _any),
    _Bound(
        "where memory is short, no host tier: mean JCT on agentcgroup at least 3x better than fcfs",
        mean_jct_s,
        1 / 3,
        _short("agentcgroup"),
    ),
    _Bound(
        "where memory is short, no host tier: mean JCT on kv-cache-tester at least 1.6x better than fcfs",
        mean_jct_s,
        1 / 1.6,
        _short("kv-cache-tester"),
    ),
    _Bound(
        "with a host tier: mean JCT in no cell worse than fcfs with a host tier",
        mean_jct_s,
        1.0,
        lambda cell: cell.host_tier,
    ),
    _Bound("p99 JCT in no cell worse than fcfs", p99_jct_s, 1.0, _any),
    _Bound("longest JCT in no cell worse than fcfs", max_jct_s, 1.0, _any),
    _Bound("p99 TTFT of returning turns in no cell worse than fcfs", returning_p99_s, 1.0, _any),
)


def judge(cells: Sequence[Cell], subject: str = SUBJECT) -> list[Promise]:
    """Checks all promises of a policy; fcfs must have run in every cell."""
    return [
        *(_judge_bound(bound, cells, subject) for bound in _BOUNDS),
        _judge_host_mean(cells, subject),
        *_judge_baselines(cells, subject),
        _judge_oracle(cells, subject),
    ]


def _judge_bound(bound: _Bound, cells: Sequence[Cell], subject: str) -> Promise:
    found = [
        (estimate.value, cell)
        for cell in cells
        if bound.concerns(cell) and (estimate := cell.ratio(subject, bound.measure)) is not None
    ]
    if not found:
        return Promise(bound.text, None, "no cell of this kind ran")
    broken = sum(not _within(value, bound.most) for value, _ in found)
    worst, cell = max(found, key=lambda one: one[0])
    return Promise(
        bound.text,
        not broken,
        f"{broken} of {len(found)} cells break it; the worst is {_told(worst)} ({cell.title})",
    )


def _judge_host_mean(cells: Sequence[Cell], subject: str) -> Promise:
    text = "with a host tier: mean JCT better than fcfs with a host tier on the mean over its cells"
    hosted = [cell for cell in cells if cell.host_tier]
    if not hosted:
        return Promise(text, None, "no cell of this kind ran")
    ratio = grid_ratio(hosted, subject)
    return Promise(text, round(ratio.value, DIGITS) < 1, with_interval(ratio))


def _judge_baselines(cells: Sequence[Cell], subject: str) -> list[Promise]:
    """Checks one promise per kind of baseline, at the setting that does best on the whole grid."""
    settings: dict[str, list[str]] = {}
    for policy in cells[0].runs:
        kind = policy.partition(":")[0]
        if kind not in (SUBJECT, *LIMITS):
            settings.setdefault(kind, []).append(policy)
    return [_judge_baseline(cells, subject, kind, names) for kind, names in settings.items()]


def _judge_baseline(cells: Sequence[Cell], subject: str, kind: str, names: Sequence[str]) -> Promise:
    best = min(names, key=lambda name: grid_ratio(cells, name).value)
    ratio = grid_ratio(cells, subject, best)
    setting = "" if best == kind else f" at its best setting, {best}"
    return Promise(
        f"mean JCT on the grid's mean better than {kind}{setting}",
        round(ratio.value, DIGITS) < 1,
        f"{with_interval(ratio)}, {_difference(ratio.value)}",
    )


def _judge_oracle(cells: Sequence[Cell], subject: str) -> Promise:
    text = "mean JCT on the grid's mean within 5 % of the oracle"
    if ORACLE not in cells[0].runs:
        return Promise(text, None, "the oracle did not run")
    ratio = grid_ratio(cells, subject, ORACLE)
    return Promise(text, _within(ratio.value, 1.05), with_interval(ratio))


def _difference(ratio: float) -> str:
    if round(ratio, DIGITS) == 1:
        return "as good as equal"
    return f"{abs(1 - ratio):.1%} {'better' if ratio < 1 else 'worse'}"


def _within(value: float, most: float) -> bool:
    return round(value, DIGITS) <= round(most, DIGITS)


def _told(ratio: float) -> str:
    """Formats a ratio; adds a multiple if the policy is clearly faster."""
    return f"{ratio:.3f} of {BASELINE}'s" + (f", {1 / ratio:.2f}x better" if ratio < 0.9 else "")


def with_interval(ratio: Estimate | None) -> str:
    """Formats as ``0.520 (0.490-0.551)``; a dash for None."""
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} ({ratio.low:.3f}-{ratio.high:.3f})"

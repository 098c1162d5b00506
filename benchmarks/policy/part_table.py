"""Formats the effect of the agent policy's parts and constants as Markdown tables. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.policy.cell import Cell, grid_ratio, mean_jct_s, p95_jct_s, returning_p99_s
from benchmarks.policy.constants import DOUBLE, HALF, Constant
from benchmarks.policy.parts import Part, host_tier_ratio, is_same, verdict
from benchmarks.policy.promises import SUBJECT, with_interval
from eval.report.intervals import Estimate
from eval.report.tables import NOTHING

NO_DIFFERENCE = "no difference"
SMALL = 0.005
"""Smaller relative changes of a cell's mean JCT count as no effect."""


def part_table(cells: Sequence[Cell], parts: Sequence[Part]) -> str:
    """Returns a row per part; above 1 jobs take longer without the part, so it helps."""
    head = ["without it", "", "mean JCT (95 %)", "p95 JCT", "p99 TTFT return", "by cell", "the part"]
    rows = [_part_row(cells, part) for part in parts]
    title = f"ratios to {SUBJECT} with all its parts, geometric mean over {_told_cells(cells)}:"
    return "\n\n".join([title, _markdown([head, *rows]), *_host_tier(cells)])


def _part_row(cells: Sequence[Cell], part: Part) -> list[str]:
    return [
        f"`{part.policy}`",
        part.told,
        with_interval(grid_ratio(cells, part.policy, SUBJECT)),
        f"{grid_ratio(cells, part.policy, SUBJECT, p95_jct_s).value:.2f}",
        _returning(cells, part.policy),
        _by_cell(cells, part.policy, SUBJECT),
        verdict(cells, part.policy),
    ]


def _returning(cells: Sequence[Cell], policy: str) -> str:
    """Returns the geometric mean ratio over the cells where turns return and wait at all."""
    ratios = [cell.ratio(policy, returning_p99_s, SUBJECT) for cell in cells]
    values = [ratio.value for ratio in ratios if ratio is not None]
    return f"{statistics.geometric_mean(values):.2f}" if values else NOTHING


def _host_tier(cells: Sequence[Cell]) -> list[str]:
    ratio = host_tier_ratio(cells)
    if ratio is None:
        return []
    return [f"mean JCT of {SUBJECT} with a host tier over that without: {with_interval(ratio)}"]


def constant_table(cells: Sequence[Cell], constants: Sequence[Constant]) -> str:
    """Returns a row per constant: mean and p95 JCT at half and at double, over those at its value."""
    told = "mean JCT (95 %); by cell; p95 JCT"
    head = ["constant", "value", "why", f"at half: {told}", f"at double: {told}"]
    rows = [
        [
            f"`{one.name}`",
            f"{one.value:g}",
            one.why,
            _turned(cells, one, HALF),
            _turned(cells, one, DOUBLE),
        ]
        for one in constants
    ]
    title = f"geometric mean over {_told_cells(cells)}:"
    return "\n\n".join([title, _markdown([head, *rows]), *_without_effect(cells, constants)])


def _turned(cells: Sequence[Cell], constant: Constant, factor: float) -> str:
    policy = constant.times(factor)
    if policy is None:
        return NOTHING
    if is_same(cells, policy, constant.base):
        return NO_DIFFERENCE
    mean = grid_ratio(cells, policy, constant.base)
    p95 = grid_ratio(cells, policy, constant.base, p95_jct_s)
    return f"{with_interval(mean)}; {_by_cell(cells, policy, constant.base)}; {with_interval(p95)}"


def _by_cell(cells: Sequence[Cell], policy: str, base: str) -> str:
    ratios = [_mean_ratio(cell, policy, base) for cell in cells]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def _without_effect(cells: Sequence[Cell], constants: Sequence[Constant]) -> list[str]:
    """Lists constants whose value has no effect: candidates for removal."""
    idle = [f"`{one.name}`" for one in constants if not any(_moves(cells, one, by) for by in (HALF, DOUBLE))]
    if not idle:
        return []
    return [f"Neither half nor double moves the mean JCT of any cell by {SMALL:.1%}: {', '.join(idle)}."]


def _moves(cells: Sequence[Cell], constant: Constant, factor: float) -> bool:
    policy = constant.times(factor)
    if policy is None:
        return False
    return any(abs(_mean_ratio(cell, policy, constant.base) - 1) >= SMALL for cell in cells)


def _mean_ratio(cell: Cell, policy: str, base: str) -> float:
    ratio: Estimate | None = cell.ratio(policy, mean_jct_s, base)
    assert ratio is not None, "a job takes time"
    return ratio.value


def _told_cells(cells: Sequence[Cell]) -> str:
    seeds = len(cells[0].runs[SUBJECT])
    return f"{len(cells)} cells, {seeds} {'seed' if seeds == 1 else 'seeds'}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    """Formats a table; the first line is the head. Columns are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join([rows[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *rows[1:]])

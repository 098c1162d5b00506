"""Formats the results of one model as a table for a terminal or a page. Pure functions to text."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cpu.cases import Figure
from benchmarks.cpu.contender import OURS
from benchmarks.cpu.goals import Goal

Values = Sequence[float]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of all contenders."""

    figure: Figure
    values: Mapping[str, Values]
    """Values by contender; one without values is left out."""
    goal: Goal | None

    def ratio(self, other: str) -> float | None:
        """Returns ours / theirs: the median of the rounds' ratios if both ran equally many, else of
        medians."""
        ours = self.values.get(OURS)
        theirs = self.values.get(other)
        if not ours or not theirs:
            return None
        if len(ours) == len(theirs):
            return statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
        return statistics.median(ours) / statistics.median(theirs)

    def best(self) -> str | None:
        """Returns the name of the best other contender by its median."""
        medians = {name: statistics.median(each) for name, each in self.values.items() if name != OURS}
        if not medians:
            return None
        pick = min if self.figure.less_is_better else max
        return pick(medians, key=lambda name: medians[name])

    def verdict(self) -> str:
        """Returns whether the goal is met; "" if that is unknown."""
        if self.goal is None or OURS not in self.values:
            return ""
        value: float | None = statistics.median(self.values[OURS])
        if self.goal.of_ratio:
            best = self.best()
            value = None if best is None else self.ratio(best)
        if value is None:
            return ""
        return "met" if self.goal.met_by(value, self.figure) else "NOT MET"


def table(rows: Sequence[Row], others: Sequence[str]) -> str:
    """Returns a line per figure: each contender's median (lowest to highest), and ours / theirs."""
    head = ["", OURS, *[cell for name in others for cell in (name, "ratio")], "goal", ""]
    lines = [head, *[_cells(row, others) for row in rows]]
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    written = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in zip(*columns, strict=True)
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([written[0], rule, *written[1:]])


def _cells(row: Row, others: Sequence[str]) -> list[str]:
    cells = [row.figure.label, _spread(row.values.get(OURS))]
    for name in others:
        ratio = row.ratio(name)
        cells += [_spread(row.values.get(name)), "" if ratio is None else f"{ratio:.2f}x"]
    return [*cells, "" if row.goal is None else row.goal.told(row.figure), row.verdict()]


def _spread(values: Values | None) -> str:
    if not values:
        return "-"
    middle = statistics.median(values)
    return f"{_number(middle, middle)} ({_number(min(values), middle)} to {_number(max(values), middle)})"


def _number(value: float, like: float) -> str:
    """Returns about three digits; ``like`` sets the number of decimals."""
    return format(value, ",.2f" if like < 9.995 else ",.1f" if like < 99.95 else ",.0f")

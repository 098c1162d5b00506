"""Formats numbers and tables for a terminal. Knows nothing of traces."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tracing.plain_text import plain_name

NOTHING = "-"
WIDTH = 100
MILLISECONDS = 3


def seconds(value: float | None) -> str:
    """Formats three or four digits: 0.123, 12.34, 123.4, 1,234."""
    if value is None:
        return NOTHING
    size = abs(value)
    decimals = 3 if size < 9.9995 else 2 if size < 99.995 else 1 if size < 999.95 else 0
    return format(value, f",.{decimals}f")


def milliseconds(value: float) -> str:
    """Formats seconds to the millisecond, whatever their size, so that columns add up."""
    return format(value, f",.{MILLISECONDS}f")


def count(value: float | None) -> str:
    """Formats a count with commas; with one decimal if it is small and not whole."""
    if value is None:
        return NOTHING
    return format(value, ",.0f" if value == int(value) or abs(value) >= 100 else ",.1f")


def tokens(value: float | None) -> str:
    """Formats tokens, in thousands from a hundred thousand on, in millions from a hundred million on."""
    if value is None:
        return NOTHING
    if abs(value) < 100_000:
        return format(value, ",.0f")
    return f"{value / 1e3:,.0f} k" if abs(value) < 1e8 else f"{value / 1e6:,.0f} M"


def percent(part: float, whole: float) -> str:
    """Formats ``12 %``; nothing if ``whole`` is 0."""
    return f"{100 * part / whole:.0f} %" if whole else NOTHING


def signed(value: float) -> str:
    return ("+" if value > 0 else "") + seconds(value)


def parts_of(values: Sequence[float], total: float) -> list[float]:
    """Rounds seconds to the millisecond so that they add up to the rounded total: rounds the largest
    remainders up, and none is off by more than a millisecond."""
    unit = 10**MILLISECONDS
    whole = round(total * unit)
    floors = [int(value * unit) for value in values]
    by_remainder = sorted(range(len(values)), key=lambda place: floors[place] - values[place] * unit)
    for place in by_remainder[: max(0, whole - sum(floors))]:
        floors[place] += 1
    return [floor / unit for floor in floors]


def aligned(lines: Sequence[Sequence[str]], num_left: int = 1, gap: str = "  ") -> list[str]:
    """Aligns columns to equal width, the first ones left, the others right. Cells may be names."""
    lines = [[plain_name(cell) for cell in line] for line in lines]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return [
        gap.join(
            cell.ljust(width) if place < num_left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def table(head: Sequence[str], lines: Sequence[Sequence[str]], num_left: int = 1) -> list[str]:
    """Aligns a table and draws a rule under its head."""
    text = aligned([head, *lines], num_left)
    return [text[0], "-" * max(map(len, text)), *text[1:]]


def wrapped(text: str, indent: int = 0, hang: int = 0) -> list[str]:
    """Wraps a text; ``hang``: additional indent from the second line on."""
    first = " " * indent
    rest = " " * (indent + hang)
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest)

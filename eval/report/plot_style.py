"""The style of a report's plots, and their types. Needs the ``report`` extra.

Colors that depend on light or dark mode are left to the page: text, grids, backgrounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from plotly import graph_objects

from eval.report.comparison import Comparison, Load

BASE_HEIGHT = 440
GREY = "#8a8f98"
BLUE = "#2f80ed"
ORANGE = "#e8710a"
GREEN = "#1a9e77"
RED = "#d64545"
OCHRE = "#c9a100"
VIOLET = "#8b5cf6"
SERIES_COLORS = (GREY, BLUE, ORANGE, GREEN, "#c2459b", VIOLET, OCHRE, "#16a5c5", RED, "#8a6240")
"""Colors of the series, visible on white and on black; the baseline is gray."""
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, slots=True)
class Variant:
    """One figure of a plot; the reader selects one."""

    label: str
    caption: str
    """The figure's numbers as text."""
    figure: graph_objects.Figure


@dataclass(frozen=True, slots=True)
class Plot:
    """A titled plot with one or several variants."""

    key: str
    """Its id in the page."""
    title: str
    explanation: str
    variants: list[Variant]


def styled(
    figure: graph_objects.Figure,
    *,
    height: int = BASE_HEIGHT,
    hovermode: str = "closest",
    showlegend: bool = True,
) -> graph_objects.Figure:
    figure.update_layout(
        template="none",
        height=height,
        hovermode=hovermode,
        showlegend=showlegend,
        margin={"l": 70, "r": 20, "t": 70, "b": 60},
        legend={"orientation": "h", "x": 0, "y": 1.0, "yanchor": "top", "yref": "container"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
    )
    return figure


def heaviest_first(comparison: Comparison) -> list[Load]:
    """Returns the loads from heaviest to lightest: policies differ most at the heaviest."""
    return comparison.loads[::-1]


def color(number: int) -> str:
    return SERIES_COLORS[number % len(SERIES_COLORS)]


def dash(number: int) -> str:
    return DASHES[number // len(SERIES_COLORS) % len(DASHES)]


def rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    """Rounds values, as a page has thousands of points."""
    return [round(float(value), 3) for value in values]

"""How the plots of a report look, and what a plot is. Needs the ``report`` extra.

Colours that depend on light or dark are left to the page: text, grids, backgrounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from plotly import graph_objects

from eval.report.comparison import Comparison, Load

BASE_HEIGHT = 440
GREY, BLUE, ORANGE, GREEN, RED, OCHRE = "#8a8f98", "#2f80ed", "#e8710a", "#1a9e77", "#d64545", "#c9a100"
VIOLET = "#8b5cf6"
SERIES_COLOURS = (GREY, BLUE, ORANGE, GREEN, "#c2459b", VIOLET, OCHRE, "#16a5c5", RED, "#8a6240")
"""The baseline is grey. All are seen on white and on black."""
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True, slots=True)
class Variant:
    """One drawing; a reader chooses among those of a plot."""

    label: str
    caption: str
    """The numbers in words."""
    figure: graph_objects.Figure


@dataclass(frozen=True, slots=True)
class Plot:
    """A titled drawing of one thing."""

    key: str
    """Its place in the page."""
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
    """The load at which policies differ most is what a reader looks at first."""
    return comparison.loads[::-1]


def colour(number: int) -> str:
    return SERIES_COLOURS[number % len(SERIES_COLOURS)]


def dash(number: int) -> str:
    return DASHES[number // len(SERIES_COLOURS) % len(DASHES)]


def rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    """Few digits: a page holds thousands of points."""
    return [round(float(value), 3) for value in values]

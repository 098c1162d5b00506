"""The plots of a comparison: job completion by load and by job, how pins ended; then those of single runs.

Needs the ``report`` extra; knows no HTML.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from plotly import graph_objects

from eval.report.comparison import Comparison, Load
from eval.report.figures import JOB_COMPLETION, count, pin_figure, seconds
from eval.report.intervals import Estimate
from eval.report.metrics import HANDED_OVER
from eval.report.plot_style import (
    GREEN,
    GREY,
    OCHRE,
    RED,
    VIOLET,
    Plot,
    Variant,
    color,
    dash,
    heaviest_first,
    rounded,
    styled,
)
from eval.report.run_plots import occupancy_plot, timeline_plot
from eval.report.tables import ratio, with_interval

MAX_CURVE_POINTS = 200
PIN_COLORS = {HANDED_OVER: GREEN, "released": GREY, "expired": OCHRE, "revoked": RED}


def make_plots(comparison: Comparison) -> list[Plot]:
    """Returns all plots for which the runs have data."""
    plots = [
        _completion(comparison),
        _distribution(comparison),
        timeline_plot(comparison),
        occupancy_plot(comparison),
        _pins(comparison),
    ]
    return [plot for plot in plots if plot.variants]


def _completion(comparison: Comparison) -> Plot:
    several = len(comparison.loads) > 1
    variants = []
    if any(JOB_COMPLETION.value(run) is not None for run in comparison.runs):
        heaviest = comparison.loads[-1]
        caption = f"At {heaviest}: {_completions(comparison, heaviest)}."
        figure = _over_loads(comparison) if several else _at_one_load(comparison)
        variants = [Variant("", caption, figure)]
    return Plot(
        "completion",
        "Job completion time against load" if several else "Job completion time",
        "Mean over a run's jobs, then over seeds; bands and bars are 95 % confidence intervals over seeds.",
        variants,
    )


def _completions(comparison: Comparison, load: Load) -> str:
    """Returns ``fcfs 80.40 ±5.06 s, continuum 58.12 ±3.96 s (0.72x 0.71-0.74)``."""
    parts = []
    for series in comparison.present(load):
        told = with_interval(comparison.estimate(series, load, JOB_COMPLETION), JOB_COMPLETION)
        compared = comparison.ratio(series, load, JOB_COMPLETION)
        parts.append(f"{series.label} {told} s" + (f" ({ratio(compared)})" if compared else ""))
    return ", ".join(parts)


def _over_loads(comparison: Comparison) -> graph_objects.Figure:
    figure = graph_objects.Figure()
    position, title = _load_axis(comparison.loads)
    highest = []
    for number, series in enumerate(comparison.series):
        found = {load: comparison.estimate(series, load, JOB_COMPLETION) for load in comparison.loads}
        points = {position(load): estimate for load, estimate in found.items() if estimate is not None}
        _add_band(figure, points, color(number), series.label)
        figure.add_scatter(
            x=list(points),
            y=[estimate.value for estimate in points.values()],
            name=series.label,
            legendgroup=series.label,
            mode="lines+markers",
            line={"color": color(number), "width": 2.5, "dash": dash(number)},
            marker={"size": 7},
            hovertemplate=f"{series.label}: %{{y:.1f}} s<extra></extra>",
        )
        highest += [min(estimate.high or 0.0, 2 * estimate.value) for estimate in points.values()]
        highest += [estimate.value for estimate in points.values()]
    figure.update_xaxes(title_text=title, rangemode="tozero" if title else "normal")
    # Bands of two or three seeds are wide: they may exceed the plot, so that the lines are not squeezed.
    figure.update_yaxes(title_text="mean job completion, s", range=[0, 1.05 * max(highest)])
    return styled(figure, hovermode="x")


def _add_band(
    figure: graph_objects.Figure, points: dict[float | str, Estimate], fill: str, group: str
) -> None:
    """Adds confidence bands of the means, if known at more than one load; cuts them at zero."""
    bounds = [(e.low, e.high) for e in points.values() if e.low is not None and e.high is not None]
    if len(points) < 2 or len(bounds) < len(points):
        return
    figure.add_scatter(
        x=[*points, *reversed(points)],
        y=[*(high for _, high in bounds), *(max(low, 0.0) for low, _ in reversed(bounds))],
        fill="toself",
        fillcolor=fill,
        opacity=0.18,
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        legendgroup=group,
        showlegend=False,
    )


def _load_axis(loads: list[Load]) -> tuple[Callable[[Load], float | str], str]:
    """Returns the position of a load: its rate or concurrency if that distinguishes loads, else its name."""
    if len({load.jobs_per_s for load in loads} - {None}) == len(loads):
        return lambda load: load.jobs_per_s or 0.0, "load, jobs per s"
    if len({load.concurrency for load in loads} - {None}) == len(loads):
        return lambda load: load.concurrency or 0, "load, jobs at once"
    return str, ""


def _at_one_load(comparison: Comparison) -> graph_objects.Figure:
    (load,) = comparison.loads
    estimates = [comparison.estimate(series, load, JOB_COMPLETION) for series in comparison.series]
    figure = graph_objects.Figure()
    figure.add_bar(
        x=[None if estimate is None else estimate.value for estimate in estimates],
        y=[series.label for series in comparison.series],
        orientation="h",
        marker={"color": [color(number) for number in range(len(estimates))]},
        error_x={
            "array": [0.0 if estimate is None else estimate.half_width or 0.0 for estimate in estimates],
            "color": GREY,
        },
        text=[with_interval(estimate, JOB_COMPLETION) for estimate in estimates],
        textposition="inside",
        insidetextanchor="start",
        hovertemplate="%{y}: %{x:.1f} s<extra></extra>",
    )
    figure.update_xaxes(title_text="mean job completion, s", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return styled(figure, height=140 + 40 * len(comparison.series), showlegend=False)


def _distribution(comparison: Comparison) -> Plot:
    return Plot(
        "distribution",
        "Distribution of job completion times",
        "Share of the jobs that are done within a time; the completed jobs of all seeds together.",
        [_curves(comparison, load) for load in heaviest_first(comparison)],
    )


def _curves(comparison: Comparison, load: Load) -> Variant:
    figure = graph_objects.Figure()
    told = []
    for number, series in enumerate(comparison.series):
        times = [job.completion_s for run in series.at(load) for job in run.programs if job.error is None]
        if not times:
            continue
        shares = np.linspace(0.0, 100.0, min(len(times), MAX_CURVE_POINTS) + 1)
        figure.add_scatter(
            x=rounded(np.percentile(times, shares)),
            y=rounded(shares),
            name=series.label,
            mode="lines",
            line={"color": color(number), "width": 2.5, "dash": dash(number)},
            hovertemplate=f"{series.label}: %{{y:.0f}} % within %{{x:.1f}} s<extra></extra>",
        )
        half, most = np.percentile(times, (50, 95)).tolist()
        told.append(f"{series.label} {seconds(half)} s and {seconds(most)} s")
    figure.update_xaxes(title_text="job completion, s", rangemode="tozero")
    figure.update_yaxes(title_text="jobs done, %", range=[0, 101])
    caption = f"Half and 95 % of the jobs are done within: {'; '.join(told)}."
    return Variant(str(load), caption, styled(figure))


def _pins(comparison: Comparison) -> Plot:
    return Plot(
        "pins",
        "How pins ended",
        "Pins per run, mean over seeds. Handed over: the job's next turn took over the KV kept for it.",
        [
            variant
            for load in heaviest_first(comparison)
            if (variant := _outcomes(comparison, load)) is not None
        ],
    )


def _outcomes(comparison: Comparison, load: Load) -> Variant | None:
    pinning = [one for one in comparison.present(load) if any(run.pins_ended for run in one.at(load))]
    if not pinning:
        return None
    figure = graph_objects.Figure()
    told: dict[str, list[str]] = {series.label: [] for series in pinning}
    seen = {cause for one in pinning for run in one.at(load) for cause in run.pins_ended}
    for cause in [*(cause for cause in PIN_COLORS if cause in seen), *sorted(seen - PIN_COLORS.keys())]:
        kind = pin_figure(cause)
        means = [comparison.estimate(one, load, kind) for one in pinning]
        values = [0.0 if mean is None else mean.value for mean in means]
        figure.add_bar(
            x=values,
            y=[series.label for series in pinning],
            orientation="h",
            name=cause.replace("_", " "),
            marker={"color": PIN_COLORS.get(cause, VIOLET)},
            text=[count(value) for value in values],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertemplate=f"%{{y}}: %{{x:,.1f}} {cause.replace('_', ' ')}<extra></extra>",
        )
        for series, value in zip(pinning, values, strict=True):
            told[series.label].append(f"{count(value)} {cause.replace('_', ' ')}")
    figure.update_xaxes(title_text="pins per run", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(barmode="stack")
    caption = "; ".join(f"{label}: {', '.join(parts)}" for label, parts in told.items())
    return Variant(str(load), f"{caption}.", styled(figure, height=170 + 40 * len(pinning)))

"""The plots of single runs next to the baseline's with the same seed: the jobs' time, the KV pool.

Needs the ``report`` extra; knows no HTML.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from plotly import graph_objects
from plotly.subplots import make_subplots

from eval.load.records import Occupancy
from eval.report.comparison import Comparison, Load, Series
from eval.report.figures import percent
from eval.report.metrics import RunResult, TurnSpan
from eval.report.plot_style import BLUE, ORANGE, Plot, Variant, heaviest_first, rounded, styled

MAX_LABEL = 24
WAITING = "waiting"
RUNNING = "running"
TOOL = "tool call"
SPAN_COLORS = {WAITING: ORANGE, RUNNING: BLUE, TOOL: "rgba(138,143,152,0.35)"}
POOL_COLORS = {
    "running": BLUE,
    "pinned": ORANGE,
    "cached": "rgba(47,128,237,0.35)",
    "free": "rgba(138,143,152,0.20)",
}
Pair = Sequence[tuple[Series, RunResult]]
"""A baseline's run and the one compared with it, or a run alone."""
Draw = Callable[[Pair], tuple[str, graph_objects.Figure]]
"""Draws a pair; returns the caption and the figure."""


def timeline_plot(comparison: Comparison) -> Plot:
    explanation = (
        "Some jobs from the middle of one run, each a line: waiting in the queue (of a server, to the first "
        "token), running, away in a tool call. Less orange is better; grey is the tools' own time."
    )
    return Plot(
        "jobs",
        "Where jobs spend their time",
        explanation,
        _pairs(comparison, lambda run: run.spans, _timeline),
    )


def occupancy_plot(comparison: Comparison) -> Plot:
    explanation = (
        "The KV pool of one run by the use of its blocks. Running and pinned blocks cannot be evicted "
        "without a cost; cached ones are free, with content that can still be reused."
    )
    return Plot("pool", "KV pool by kind over time", explanation, _pairs(comparison, _samples, _areas))


def _pairs(comparison: Comparison, has: Callable[[RunResult], object], draw: Draw) -> list[Variant]:
    """Returns a variant for each series and load, next to its baseline; a single series alone."""
    variants = []
    for load in heaviest_first(comparison):
        for series in comparison.present(load):
            baseline = comparison.baseline(series)
            if baseline is series and any(
                comparison.baseline(one) is series for one in comparison.series[1:]
            ):
                continue
            pair = _one_seed(list(dict.fromkeys((baseline, series))), load, has)
            if pair:
                told = " and ".join(one.label for one, _ in reversed(pair))
                caption, figure = draw(pair)
                variants.append(Variant(f"{told}, {load}", caption, figure))
    return variants


def _one_seed(both: list[Series], load: Load, has: Callable[[RunResult], object]) -> Pair:
    """Returns runs with data to draw, of the same seed if all have one in common."""
    runs = [(series, run) for series in both for run in series.at(load) if has(run)]
    for seed in dict.fromkeys(run.setting.seed for _, run in runs):
        same = {series: run for series, run in runs if run.setting.seed == seed}
        if len(same) == len(both):
            return list(same.items())
    first: dict[Series, RunResult] = {}
    for series, run in runs:
        first.setdefault(series, run)
    return list(first.items())


def _timeline(pair: Pair) -> tuple[str, graph_objects.Figure]:
    figure = _panels(pair)
    starts = [span for _, run in pair for span in run.spans]
    jobs = list(dict.fromkeys(span.job_id for span in sorted(starts, key=lambda span: span.start_s)))
    rows = {job_id: number for number, job_id in enumerate(jobs)}
    told = []
    for column, (series, run) in enumerate(pair, 1):
        pieces = _pieces(run.spans)
        for kind, color in SPAN_COLORS.items():
            mine = [piece for piece in pieces if piece.kind == kind]
            figure.add_bar(
                base=[round(piece.start_s, 3) for piece in mine],
                x=[round(piece.end_s - piece.start_s, 3) for piece in mine],
                y=[rows[piece.job_id] for piece in mine],
                text=[piece.told for piece in mine],
                orientation="h",
                width=0.75,
                name=kind,
                legendgroup=kind,
                showlegend=column == 1,
                marker={"color": color, "line": {"width": 0}},
                textposition="none",
                hovertemplate="%{text}, %{x:.2f} s from %{base:.1f} s<extra></extra>",
                row=1,
                col=column,
            )
        told.append(f"{series.label}: {_shares(pieces)}")
    ends = [span.end_s for span in starts]
    window = [min(span.start_s for span in starts), max(ends)]
    figure.update_xaxes(title_text="time, s", range=window)
    figure.update_yaxes(
        tickvals=list(rows.values()),
        ticktext=[_shortened(job_id) for job_id in rows],
        range=[len(rows) - 0.4, -0.6],
        automargin=True,
    )
    figure.update_layout(barmode="overlay")
    return f"Of these jobs' time, {'; '.join(told)}.", styled(figure, height=150 + 18 * len(rows))


@dataclass(frozen=True, slots=True)
class _Piece:
    """An interval of a job's time."""

    job_id: str
    kind: str
    start_s: float
    end_s: float
    told: str


def _pieces(spans: list[TurnSpan]) -> list[_Piece]:
    last: dict[str, TurnSpan] = {}
    pieces = []
    for span in spans:
        before = last.get(span.job_id)
        name = f"{span.job_id}, turn {span.turn}"
        if before is not None and before.end_s < span.start_s:
            told = f"{span.job_id}, {before.tool or 'tool'}"
            pieces.append(_Piece(span.job_id, TOOL, before.end_s, span.start_s, told))
        scheduled_s = min(span.start_s + span.wait_s, span.end_s)
        pieces.append(_Piece(span.job_id, WAITING, span.start_s, scheduled_s, f"{name}, waiting"))
        pieces.append(_Piece(span.job_id, RUNNING, scheduled_s, span.end_s, f"{name}, running"))
        last[span.job_id] = span
    return pieces


def _shares(pieces: list[_Piece]) -> str:
    total = {kind: math.fsum(p.end_s - p.start_s for p in pieces if p.kind == kind) for kind in SPAN_COLORS}
    whole = math.fsum(total.values()) or 1.0
    return ", ".join(f"{kind} {percent(100 * part / whole)} %" for kind, part in total.items())


def _samples(run: RunResult) -> list[float]:
    return run.occupancy.time_s if run.occupancy is not None else []


def _areas(pair: Pair) -> tuple[str, graph_objects.Figure]:
    figure = _panels(pair)
    told = []
    for column, (series, run) in enumerate(pair, 1):
        assert run.occupancy is not None
        shares = _pool_shares(run.occupancy)
        for kind, color in POOL_COLORS.items():
            figure.add_scatter(
                x=rounded(run.occupancy.time_s),
                y=rounded(shares[kind]),
                name=kind,
                legendgroup=kind,
                showlegend=column == 1,
                stackgroup=f"pool {column}",
                fillcolor=color,
                mode="lines",
                line={"width": 0, "shape": "hv", "color": color},
                hovertemplate=f"{kind} %{{y:.1f}} %<extra></extra>",
                row=1,
                col=column,
            )
        means = [f"{kind} {percent(float(np.mean(values)))} %" for kind, values in shares.items()]
        told.append(f"{series.label}: {', '.join(means)}")
    figure.update_xaxes(title_text="time, s")
    figure.update_yaxes(range=[0, 100])
    figure.update_yaxes(title_text="blocks of the pool, %", col=1)
    return f"Mean over the samples, {'; '.join(told)}.", styled(figure, hovermode="x unified")


def _pool_shares(occupancy: Occupancy) -> dict[str, np.ndarray]:
    """Returns percent of all blocks by kind."""
    blocks = {kind: np.array(getattr(occupancy, kind), dtype=np.float64) for kind in POOL_COLORS}
    whole = np.maximum(sum(blocks.values()), 1.0)
    return {kind: 100 * held / whole for kind, held in blocks.items()}


def _panels(pair: Pair) -> graph_objects.Figure:
    """Makes a figure with one panel per run, on common axes."""
    return make_subplots(
        rows=1,
        cols=len(pair),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[f"<b>{series.label}</b>" for series, _ in pair],
    )


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_LABEL else f"{text[: MAX_LABEL - 1]}…"

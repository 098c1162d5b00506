"""Formats comparisons for a terminal: every figure of a few runs, or a line per policy and load of many.

Pure functions from results to text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from eval.report.caveats import Caveats
from eval.report.comparison import Comparison, Load, Series
from eval.report.figures import ALL, JOB_COMPLETION, MAIN, Figure, draft_figures, pin_figures, task_figures
from eval.report.intervals import Estimate
from eval.report.metrics import RunResult
from eval.report.results import ResultFile

MAX_WIDTH = 110
MAX_SIDE_BY_SIDE = 3
BEST = "*"
NOTHING = "-"


def render(runs: Sequence[RunResult]) -> str:
    """Returns the report of runs that were not written to a file; the first one's policy is the baseline."""
    return render_comparison(Comparison([ResultFile(runs=list(runs))]))


def render_comparison(comparison: Comparison) -> str:
    """Returns columns side by side for a few series at one load, else the main table; then the notes."""
    if not comparison.series:
        return "No runs."
    if len(comparison.loads) == 1 and len(comparison.series) <= MAX_SIDE_BY_SIDE:
        return f"{side_by_side(comparison, comparison.loads[0])}\n{_notes(comparison, starred=False)}"
    return f"{main_table(comparison)}\n{_notes(comparison, starred=True)}"


def main_table(comparison: Comparison) -> str:
    """A block per load, a line per series, a column per headline figure; stars mark a block's best."""
    heads = [[figure.short[row] + " " for figure in MAIN] for row in (0, 1)]
    lines = [["policy", heads[0][0], "JCT", *heads[0][1:]], ["", heads[1][0], "ratio", *heads[1][1:]]]
    places = []
    for load in comparison.loads:
        places.append((len(lines), load))
        lines += [_main_line(comparison, series, load) for series in comparison.present(load)]
    text = aligned(lines, gap=" ")
    for place, load in reversed(places):
        text.insert(place, load_title(comparison, load))
    rule = "-" * max(len(line) for line in text)
    return "\n".join([*text[:2], rule, *text[2:], rule])


def load_title(comparison: Comparison, load: Load) -> str:
    """Returns the load and the number of runs that each series has there."""
    sizes = sorted({len(series.at(load)) for series in comparison.present(load)})
    told = " to ".join(str(size) for size in dict.fromkeys((sizes[0], sizes[-1])))
    return f"{load} ({told} {'seed' if sizes[-1] == 1 else 'seeds'})"


def _main_line(comparison: Comparison, series: Series, load: Load) -> list[str]:
    cells = []
    for figure in MAIN:
        estimate = comparison.estimate(series, load, figure)
        shown = with_interval(estimate, figure) if figure is JOB_COMPLETION else plain(estimate, figure)
        cells.append(shown + (BEST if series in comparison.best(load, figure) else " "))
    return [f"  {series.label}", cells[0], ratio(comparison.ratio(series, load, JOB_COMPLETION)), *cells[1:]]


def side_by_side(comparison: Comparison, load: Load) -> str:
    """Returns a line per figure, a column per series, then a column per ratio to a baseline."""
    compared = [one for one in comparison.series if comparison.baseline(one) is not one]
    heads = [series.label for series in comparison.series]
    heads += [f"{one.label} / {comparison.baseline(one).label}" for one in compared]
    lines = [["", *heads]]
    runs = comparison.runs
    for figure in [*task_figures(runs), *ALL, *draft_figures(runs), *pin_figures(runs)]:
        cells = [with_interval(comparison.estimate(one, load, figure), figure) for one in comparison.series]
        cells += [ratio(comparison.ratio(one, load, figure)) for one in compared]
        lines.append([figure.label, *cells])
    head, *body = aligned(lines, gap="  ")
    return "\n".join([f"at {load_title(comparison, load)}", head, "-" * max(map(len, body)), *body])


def plain(estimate: Estimate | None, figure: Figure) -> str:
    return NOTHING if estimate is None else figure.form(estimate.value)


def with_interval(estimate: Estimate | None, figure: Figure) -> str:
    """Returns ``12.30 ±0.80``; only the value if there is no interval or all seeds agree."""
    if estimate is None or not estimate.half_width:
        return plain(estimate, figure)
    half_width = figure.form(estimate.half_width, like=estimate.value)
    return f"{figure.form(estimate.value)} ±{half_width}"


def ratio(estimate: Estimate | None) -> str:
    """Returns ``0.52x 0.49-0.55``: the ratio, then its interval if it has one."""
    if estimate is None:
        return NOTHING
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.2f}x"
    return f"{estimate.value:.2f}x {estimate.low:.2f}-{estimate.high:.2f}"


def aligned(lines: list[list[str]], gap: str) -> list[str]:
    """Aligns columns, the first one left, the others right."""
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return [
        gap.join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def notes_of(groups: Sequence[Sequence[RunResult]]) -> str:
    """What the runs of each group assume, and how their figures are defined: each note once."""
    comparisons = (Comparison([ResultFile(runs=list(runs))]) for runs in groups)
    notes = (note for comparison in comparisons for note in _marked(comparison, starred=False))
    return _wrapped(list(dict.fromkeys(notes)))


def _notes(comparison: Comparison, *, starred: bool) -> str:
    return _wrapped(_marked(comparison, starred=starred))


def _marked(comparison: Comparison, *, starred: bool) -> list[tuple[str, str]]:
    """Each note with the mark that it begins with."""
    caveats = Caveats.of(comparison)
    marked = [("!", text) for text in (*caveats.warnings, *caveats.differences)]
    if starred and len(comparison.series) > 1:
        marked.append(("*", "marks the best value at its load"))
    return marked + [("-", text) for text in (*caveats.assumptions, *caveats.definitions)]


def _wrapped(marked: Sequence[tuple[str, str]]) -> str:
    return "\n".join(
        textwrap.fill(
            text, MAX_WIDTH, initial_indent=f"{mark} ", subsequent_indent="  ", break_on_hyphens=False
        )
        for mark, text in marked
    )

"""A self-contained HTML page of a comparison: tables, plots, and what was measured and assumed.

It loads nothing else; plotly's script, 4.8 MB, is part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jinja2

from eval.errors import ResultError
from eval.report.caveats import Caveats
from eval.report.comparison import Comparison, Load, Series
from eval.report.figures import ALL, JOB_COMPLETION, MAIN, Figure, draft_figures, pin_figures, task_figures
from eval.report.intervals import Estimate
from eval.report.results import ResultFile
from eval.report.tables import load_title, plain, ratio, with_interval


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table."""

    text: str
    ratio: str = ""
    """Ratio to the baseline, with its interval."""
    kind: str = ""
    """CSS class: ``best``, or of a ratio ``better`` or ``worse`` if its interval excludes 1."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table."""

    label: str
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class Block:
    """The rows of one load."""

    title: str
    rows: list[Row]


def require_plotly() -> None:
    """Raises ``ResultError`` if plotly is missing; called before a long run."""
    try:
        import plotly  # noqa: F401
    except ModuleNotFoundError as error:
        raise ResultError(
            "An HTML report needs plotly, which is not installed: pip install 'continuum-engine[report]'."
        ) from error


def write_html(path: Path, files: Sequence[ResultFile], names: Sequence[str] = ()) -> None:
    """Writes the report of all runs in ``files``; the first run's policy is the baseline.

    ``names`` distinguish the files if several have policies with the same name. Creates the folder if needed.
    Raises ``ResultError`` if plotly is missing, if there are no runs, or if the file cannot be written.
    """
    require_plotly()
    comparison = Comparison(files, names)
    if not comparison.series:
        raise ResultError(f"There are no runs to write a report of to {path}.")
    page = _page(comparison)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ResultError(f"Cannot write the report {path}: {error.strerror}.") from error


def _page(comparison: Comparison) -> str:
    from plotly.offline import get_plotlyjs  # an extra, and 5 MB

    from eval.report.plots import make_plots

    return _template().render(
        title=_title(comparison),
        subtitle=_subtitle(comparison),
        summary=_summary(comparison),
        caveats=Caveats.of(comparison),
        heads=[" ".join(figure.short) for figure in MAIN],
        main=[_main_block(comparison, load) for load in comparison.loads],
        plots=make_plots(comparison),
        labels=[series.label for series in comparison.series],
        details=[_detail_block(comparison, load) for load in comparison.loads],
        commands=[file.command for file in comparison.files if file.command],
        plotly=get_plotlyjs(),
    )


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["script"] = lambda text: text.replace("<", "\\u003c")
    return environment.get_template("html_report.jinja")


def _title(comparison: Comparison) -> str:
    titles = dict.fromkeys(file.title for file in comparison.files if file.title)
    return " | ".join(titles) or ", ".join(series.label for series in comparison.series)


def _subtitle(comparison: Comparison) -> str:
    """The settings that all runs share, and the number of runs."""
    settings = [series.setting for series in comparison.series]
    simulated = {setting.simulated for setting in settings}
    told = [
        "simulated"
        if simulated == {True}
        else "measured"
        if simulated == {False}
        else "simulated and measured",
        *dict.fromkeys(f"model {setting.model}" for setting in settings),
        *dict.fromkeys(setting.hardware for setting in settings if setting.hardware),
        *dict.fromkeys(
            f"{setting.num_replicas} replicas" for setting in settings if setting.num_replicas > 1
        ),
        *dict.fromkeys(f"workload {setting.workload}" for setting in settings if setting.workload),
    ]
    number = len(comparison.runs)
    return f"{', '.join(told)}; {number} {'run' if number == 1 else 'runs'}"


def _summary(comparison: Comparison) -> list[str]:
    """A sentence per policy at the heaviest load that it and its baseline ran."""
    sentences = []
    for series in comparison.series:
        baseline = comparison.baseline(series)
        loads = [load for load in comparison.loads if series.at(load) and baseline.at(load)]
        if loads and (baseline is not series or len(comparison.series) == 1):
            sentences.append(_sentence(comparison, series, baseline, loads[-1]))
    return sentences


def _sentence(comparison: Comparison, series: Series, baseline: Series, load: Load) -> str:
    def told(one: Series) -> str:
        return with_interval(comparison.estimate(one, load, JOB_COMPLETION), JOB_COMPLETION) + " s"

    compared = comparison.ratio(series, load, JOB_COMPLETION)
    start = f"{series.label}, at {load}: mean job completion {told(series)}"
    if compared is None:
        return f"{start}."
    start += f" against {told(baseline)} of {baseline.label}, {compared.value:.2f}x"
    if compared.low is None or compared.high is None:
        return f"{start}; one pair of runs, so the difference may be chance."
    interval = f"95 % interval {compared.low:.2f} to {compared.high:.2f}"
    doubt = "; no difference is shown" if compared.low <= 1 <= compared.high else ""
    return f"{start} ({interval}{doubt})."


def _main_block(comparison: Comparison, load: Load) -> Block:
    rows = []
    for series in comparison.present(load):
        cells = [_headline(comparison, series, load, figure) for figure in MAIN]
        compared = comparison.ratio(series, load, JOB_COMPLETION)
        cells.insert(1, Cell(ratio(compared), kind=_verdict(compared)))
        rows.append(Row(series.label, cells))
    return Block(load_title(comparison, load), rows)


def _headline(comparison: Comparison, series: Series, load: Load, figure: Figure) -> Cell:
    estimate = comparison.estimate(series, load, figure)
    text = with_interval(estimate, figure) if figure is JOB_COMPLETION else plain(estimate, figure)
    return Cell(text, kind="best" if series in comparison.best(load, figure) else "")


def _verdict(compared: Estimate | None) -> str:
    """Returns the verdict on a ratio of times, of which less is better."""
    if compared is None or compared.low is None or compared.high is None:
        return ""
    return "better" if compared.high < 1 else "worse" if compared.low > 1 else ""


def _detail_block(comparison: Comparison, load: Load) -> Block:
    rows = []
    runs = comparison.runs
    for figure in [*task_figures(runs), *ALL, *draft_figures(runs), *pin_figures(runs)]:
        cells = []
        for series in comparison.series:
            compared = comparison.ratio(series, load, figure)
            told = "" if compared is None else ratio(compared)
            cells.append(Cell(with_interval(comparison.estimate(series, load, figure), figure), told))
        rows.append(Row(figure.label, cells))
    return Block(load_title(comparison, load), rows)

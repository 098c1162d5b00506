"""Formats the results of a run as text for a terminal or a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gpu.record import DONE, Check, Figure, Report, SectionRecord

MARKS = {True: "met", False: "NOT MET", None: ""}


def report_text(report: Report) -> str:
    """Returns the report: first what is wrong or missing, then the tables."""
    machine = report.machine
    libraries = f"torch {machine.torch}, triton {machine.triton}, transformers {machine.transformers}"
    head = f"{machine.device}; {libraries}; {report.seconds:.0f} s of {report.budget_s:.0f}"
    parts = ["\n".join(filter(None, (head, report.note, *_faults(report.sections))))]
    for section in report.sections:
        parts += _section_parts(section)
    return "\n\n".join(parts)


def _faults(sections: Sequence[SectionRecord]) -> Iterator[str]:
    for section in sections:
        if section.status != DONE:
            yield f"{section.name}: {section.status}: {section.reason}"
        wrong = [check for check in section.checks if not check.passed]
        yield from (f"{section.name}: WRONG: {check.name}: {_why(check)}" for check in wrong)
        yield from (f"{section.name}: left out: {each}" for each in section.skipped)


def _why(check: Check) -> str:
    found = "no number" if check.error is None else f"{check.error:.2e}, limit {check.limit:.2e}"
    return f"{found}. {check.note}"


def _section_parts(section: SectionRecord) -> Iterator[str]:
    """Yields a section's tables and the notes on their lines."""
    if section.checks:
        head = (f"{section.name}: checks", "largest error", "limit", "")
        yield _aligned([head, *map(_check_cells, section.checks)])
    if section.figures:
        titles = (section.name, "median (lowest to highest)", "floor", "share", "goal", "")
        yield _aligned([titles, *map(_figure_cells, section.figures)])
    of_checks = [f"{check.name}: {check.note}." for check in section.checks if check.passed and check.note]
    of_figures = [f"{figure.name}: {figure.note}." for figure in section.figures if figure.note]
    if of_checks or of_figures:
        yield "\n".join(of_checks + of_figures)


def _check_cells(check: Check) -> tuple[str, ...]:
    error = "-" if check.error is None else f"{check.error:.2e}"
    return check.name, error, f"{check.limit:.2e}", "right" if check.passed else "WRONG"


def _figure_cells(figure: Figure) -> tuple[str, ...]:
    spread = " to ".join(_number(value, figure.median) for value in (figure.minimum, figure.maximum))
    floor = "-" if figure.floor is None else f"{_number(figure.floor, figure.floor)} {figure.unit}"
    share = "-" if figure.share_of_floor is None else f"{figure.share_of_floor:.1%}"
    median = f"{_number(figure.median, figure.median)} {figure.unit} ({spread})"
    return figure.name, median, floor, share, figure.goal, MARKS[figure.met]


def _aligned(lines: Sequence[tuple[str, ...]]) -> str:
    """Returns a Markdown table."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    written = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([written[0], rule, *written[1:]])


def _number(value: float, like: float) -> str:
    """Returns about three digits; ``like`` sets the number of decimals."""
    size = abs(like)
    decimals = 4 if size < 0.0995 else 3 if size < 0.995 else 2 if size < 9.95 else 1 if size < 99.5 else 0
    return format(value, f",.{decimals}f")

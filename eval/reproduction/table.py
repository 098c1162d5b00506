"""Formats the published figures and ours as text: a block per setting, a line per system. Pure functions."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from eval.report.figures import seconds
from eval.report.intervals import Estimate
from eval.report.tables import MAX_WIDTH, NOTHING, aligned
from eval.reproduction.experiment import Point
from eval.reproduction.published import BASELINE, Measure, PaperFigure, Published
from eval.reproduction.verdict import Outcome, Verdict, outcome

_HEADS = (
    ["", "", "published", "", "here", "", "", ""],
    ["  system", "policy", "s", "multiple", "s", "multiple", "95 %", "verdict"],
)


def figure_table(figure: PaperFigure, points: Sequence[Point]) -> str:
    """Returns title, a block per point, then the reasons that verdicts refer to by number."""
    lines = [list(head) for head in _HEADS]
    titles: list[tuple[int, str]] = []
    reasons: list[str] = []
    for point in points:
        titles.append((len(lines), _block_title(point)))
        lines += [_line(figure, point, policy, reasons) for policy in point.runs]
        lines += [_step(figure, point, policy, base, reasons) for policy, base in point.setting.steps]
    text = aligned([[_name(line), *line[2:]] for line in lines], gap="  ")
    for place, title in reversed(titles):
        text.insert(place, title)
    rule = "-" * max(map(len, text))
    told = [_wrapped(f"[{number}]", reason) for number, reason in enumerate(reasons, 1)]
    head = f"{figure.name}: {figure.title} ({figure.source})"
    return "\n".join([textwrap.fill(head, MAX_WIDTH), *text[:2], rule, *text[2:], rule, *told])


def _name(line: Sequence[str]) -> str:
    """Returns the paper's name and our policy as one left-aligned column."""
    return f"{line[0]:20}{line[1]}"


def _block_title(point: Point) -> str:
    measure = "" if point.setting.measure is Measure.MEAN else f", {point.setting.measure.value}"
    times = "" if point.factor == 1 else f" ({point.factor} times the published load)"
    return f"{point.setting.title}{times}{measure}"


def _line(figure: PaperFigure, point: Point, policy: str, reasons: list[str]) -> list[str]:
    published = point.setting.system(policy)
    return [
        f"  {'this project' if published is None else published.system}",
        policy,
        _published_seconds(published, figure),
        *_multiples(point, policy, BASELINE, seconds(point.seconds(policy).value)),
        _verdict(outcome(point, policy, figure.tolerance), reasons),
    ]


def _step(figure: PaperFigure, point: Point, policy: str, base: str, reasons: list[str]) -> list[str]:
    """Returns the line for what one policy adds to another."""
    published = point.setting.system(policy)
    return [
        f"  by {policy if published is None else published.system}",
        f"{policy}/{base}",
        NOTHING,
        *_multiples(point, policy, base, NOTHING),
        _verdict(outcome(point, policy, figure.tolerance, base), reasons),
    ]


def _multiples(point: Point, policy: str, base: str, ours_s: str) -> list[str]:
    """Returns the published multiple, our seconds, our multiple and its interval."""
    published = point.setting.multiple(policy, base)
    ours = point.multiple(policy, base)
    return [
        NOTHING if published is None else f"{published:.2f}x",
        ours_s,
        NOTHING if policy == base else f"{ours.value:.2f}x",
        "" if policy == base else _interval(ours),
    ]


def _published_seconds(published: Published | None, figure: PaperFigure) -> str:
    if published is None or published.seconds is None:
        return NOTHING
    return f"{published.seconds:,g}{'≈' if figure.read_off_plot else ''}"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return "1 seed"
    return f"{estimate.low:.2f}-{estimate.high:.2f}"


def _verdict(found: Outcome | None, reasons: list[str]) -> str:
    if found is None:
        return ""
    if found.reason is None:
        return found.verdict.value
    if found.reason not in reasons:
        reasons.append(found.reason)
    return f"{found.verdict.value} [{reasons.index(found.reason) + 1}]"


def summary(done: Sequence[tuple[PaperFigure, Sequence[Point]]]) -> str:
    """Counts reproduced multiples: at the published load, where memory is short, and of other readings."""
    at_load: list[Outcome] = []
    pressed: list[Outcome] = []
    other: list[Outcome] = []
    for figure, points in done:
        for point in points:
            counted = other if figure.is_other_reading else at_load if point.factor == 1 else pressed
            pairs = [*((policy, BASELINE) for policy in point.runs), *point.setting.steps]
            found = (outcome(point, policy, figure.tolerance, base) for policy, base in pairs)
            counted += [one for one in found if one is not None]
    told = (
        ("At the published loads", at_load),
        ("Where memory was not short there, at 2, 4 or 8 times the load", pressed),
        ("Under another reading of the workload", other),
    )
    return "\n".join(textwrap.fill(f"{head}: {_counted(found)}.", MAX_WIDTH) for head, found in told if found)


def _counted(found: Sequence[Outcome]) -> str:
    verdicts = Counter(one.verdict for one in found)
    told = [
        f"{verdicts[one]} {one.value}" for one in Verdict if one is not Verdict.REPRODUCED and verdicts[one]
    ]
    others = f" ({', '.join(told)})" if told else ""
    num_open = sum(one.is_open for one in found)
    open_told = f"; in {num_open} of these the interval also contains 1" if num_open else ""
    return f"{verdicts[Verdict.REPRODUCED]} of {len(found)} multiples reproduced{open_told}{others}"


def bullets(texts: Sequence[str]) -> str:
    return "\n".join(_wrapped("-", text) for text in texts)


def _wrapped(mark: str, text: str) -> str:
    return textwrap.fill(
        text,
        MAX_WIDTH,
        initial_indent=f"{mark} ",
        subsequent_indent=" " * (len(mark) + 1),
        break_on_hyphens=False,
    )

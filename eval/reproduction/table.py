"""The published figures and ours as text: a block per setting, a line per system. Pure functions."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from eval.figures import seconds
from eval.intervals import Estimate
from eval.report import MAX_WIDTH, NOTHING, aligned
from eval.reproduction.experiment import Point
from eval.reproduction.published import BASELINE, Measure, PaperFigure, Published
from eval.reproduction.verdict import Outcome, Verdict, outcome

_HEADS = (
    ["", "", "published", "", "here", "", "", ""],
    ["  system", "policy", "s", "multiple", "s", "multiple", "95 %", "verdict"],
)


def figure_table(figure: PaperFigure, points: Sequence[Point]) -> str:
    """Title, a block per point, then the reasons that verdicts refer to by number."""
    lines = [list(head) for head in _HEADS]
    titles: list[tuple[int, str]] = []
    reasons: list[str] = []
    for point in points:
        titles.append((len(lines), _block_title(point)))
        lines += [_line(figure, point, policy, reasons) for policy in point.runs]
    text = aligned([[_name(line), *line[2:]] for line in lines], gap="  ")
    for place, title in reversed(titles):
        text.insert(place, title)
    rule = "-" * max(map(len, text))
    told = [_wrapped(f"[{number}]", reason) for number, reason in enumerate(reasons, 1)]
    head = f"{figure.name}: {figure.title} ({figure.source})"
    return "\n".join([textwrap.fill(head, MAX_WIDTH), *text[:2], rule, *text[2:], rule, *told])


def _name(line: Sequence[str]) -> str:
    """The paper's name and what runs in its place, as one column to the left."""
    return f"{line[0]:18}{line[1]}"


def _block_title(point: Point) -> str:
    measure = "" if point.setting.measure is Measure.MEAN else f", {point.setting.measure.value}"
    times = "" if point.factor == 1 else f" ({point.factor} times the published load)"
    return f"{point.setting.title}{times}{measure}"


def _line(figure: PaperFigure, point: Point, policy: str, reasons: list[str]) -> list[str]:
    published = next((one for one in point.setting.published if one.policy == policy), None)
    multiple = point.setting.multiple(policy)
    ours = point.multiple(policy)
    is_base = policy == BASELINE
    return [
        f"  {'this project' if published is None else published.system}",
        policy,
        _published_seconds(published, figure),
        NOTHING if multiple is None else f"{multiple:.2f}x",
        seconds(point.seconds(policy).value),
        NOTHING if is_base else f"{ours.value:.2f}x",
        _interval(ours) if not is_base else "",
        _verdict(outcome(point, policy, figure.tolerance), reasons),
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
    """How many multiples come out, at the published load and where memory is short."""
    at_load: Counter[Verdict] = Counter()
    pressed: Counter[Verdict] = Counter()
    for figure, points in done:
        for point in points:
            for policy in point.runs:
                found = outcome(point, policy, figure.tolerance)
                if found is not None:
                    (at_load if point.factor == 1 else pressed)[found.verdict] += 1
    lines = [f"At the published loads: {_counted(at_load)}."]
    if pressed:
        lines.append(f"Where memory was not short there, at 2, 4 or 8 times the load: {_counted(pressed)}.")
    return "\n".join(lines)


def _counted(verdicts: Counter[Verdict]) -> str:
    whole = sum(verdicts.values())
    others = ", ".join(
        f"{verdicts[one]} {one.value}" for one in Verdict if one is not Verdict.COMES_OUT and verdicts[one]
    )
    return f"{verdicts[Verdict.COMES_OUT]} of {whole} multiples come out{f' ({others})' if others else ''}"


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

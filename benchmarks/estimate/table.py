"""Formats an evaluation as text for a terminal. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from benchmarks.estimate.evaluation import ESTIMATOR, PER_TOOL, Evaluation, Protocol
from benchmarks.estimate.scores import SHOWN, Interval
from benchmarks.estimate.timing import Microseconds, Timing
from benchmarks.estimate.turns import TurnScores
from eval.report.tables import MAX_WIDTH, NOTHING, aligned

NUM_PROGRAMS = 12
"""Number of programs shown, the most frequent; the JSON has all."""
ANSWER_GOAL_US = 50
CORRECTED_GOAL_US = 500


def render(evaluation: Evaluation) -> str:
    """Returns title, a table per protocol, programs, turns, times, then the notes."""
    head = (
        f"{evaluation.title}\n{evaluation.num_calls:,} calls (mean {evaluation.mean_call_s:.2f} s) of "
        f"{evaluation.num_jobs:,} jobs in {evaluation.num_groups:,} groups, {evaluation.num_folds} folds"
    )
    blocks = [head, *(_protocol(one) for one in evaluation.protocols), _programs(evaluation.protocols[0])]
    blocks += [_parallel(evaluation), _turns(evaluation.turns), _timing(evaluation.timing)]
    return "\n\n".join([*filter(None, blocks), _notes([*evaluation.notes, *evaluation.turns.notes])])


# ---- how long calls take ----


def _protocol(protocol: Protocol) -> str:
    """Returns a line per method, with the first one's differences from it at the end."""
    heads = [
        ["", "pinball", "log", *["ended"] * len(SHOWN), "off", "off in", "pinball", "off in program"],
        [
            "",
            "s",
            "",
            *(f"by {level:g}".replace("0.", ".") for level in SHOWN),
            "all",
            "prog.",
            "ours / it",
            "ours - it",
        ],
    ]
    against = {one.baseline: one for one in protocol.comparisons}
    lines = []
    for scores in protocol.scores:
        compared = against.get(scores.name)
        ended = [f"{100 * scores.ended_by[str(level)]:.1f}" for level in SHOWN]
        lines.append(
            [
                f"  {scores.name}",
                f"{scores.pinball_s.value:.3f}",
                f"{scores.pinball_log.value:.3f}",
                *ended,
                f"{100 * scores.calibration_error.value:.1f}",
                f"{100 * scores.calibration_error_by_program.value:.1f}",
                NOTHING if compared is None else _ratio(compared.pinball_s_ratio),
                NOTHING if compared is None else _difference(compared.calibration_error_by_program),
            ]
        )
    learned = against.get(ESTIMATOR)
    below = ""
    if learned is not None:
        ratios = f"{_ratio(learned.pinball_s_ratio, 3)} in s, {_ratio(learned.pinball_log_ratio, 3)} in ln s"
        below = f"\n{learned.name} / {learned.baseline}: {ratios}"
    skipped = (
        f", {protocol.num_skipped:,} left out as some method had no data" if protocol.num_skipped else ""
    )
    return _table(f"{protocol.name}: {protocol.num_calls:,} calls{skipped}", heads, lines) + below


def _programs(protocol: Protocol) -> str:
    heads = [
        ["", "", "pinball, s", "", "ended by 0.5, 0.9", ""],
        ["", "calls", "ours", "per tool", "ours", "per tool"],
    ]
    lines = [
        [
            f"  {one.program}",
            f"{one.num_calls:,}",
            *(f"{one.pinball_s[name]:.3f}" for name in (ESTIMATOR, PER_TOOL)),
            *(
                f"{100 * one.ended_by[name]['0.5']:.0f} {100 * one.ended_by[name]['0.9']:3.0f}"
                for name in (ESTIMATOR, PER_TOOL)
            ),
        ]
        for one in protocol.programs[:NUM_PROGRAMS]
    ]
    left = len(protocol.programs) - len(lines)
    more = f" ({left} rarer ones are not shown)" if left else ""
    return _table(f"by program, {protocol.name}{more}", heads, lines)


def _parallel(evaluation: Evaluation) -> str:
    scores = evaluation.parallel
    if scores is None:
        return ""
    ended = ", ".join(f"{100 * share:.1f} % by {level}" for level, share in scores.ended_by.items())
    return _filled(
        f"parallel calls, as the last of independent ones: {scores.num_turns:,} turns of held-out groups; "
        f"pinball {scores.pinball_s:.3f} s; ended {ended}"
    )


# ---- what follows a turn ----


def _turns(scores: TurnScores) -> str:
    heads = [["what follows a turn", "told", "base rate", "ratio"]]
    lines = [
        [
            "  last turn, Brier score",
            f"{scores.brier:.5f}",
            f"{scores.brier_of_base_rate:.5f}",
            _ratio(scores.brier_ratio),
        ],
        [
            "  last turn, log loss",
            f"{scores.log_loss:.5f}",
            f"{scores.log_loss_of_base_rate:.5f}",
            _ratio(scores.log_loss_ratio),
        ],
        [
            "  growth of the prompt, RMSE in tokens (ratio: of the squares)",
            f"{scores.growth_rmse_tokens:,.0f}",
            f"{scores.growth_rmse_of_mean_tokens:,.0f}",
            _ratio(scores.growth_mse_ratio),
        ],
    ]
    ends = "; ".join(
        f"{one.end}: {one.num_turns:,} turns, P(last) {_percent(one.mean_probability)} predicted, "
        f"{_percent(one.share_last)} observed"
        for one in scores.ends
    )
    growth = (
        f"growth: mean {scores.growth_mean_tokens:,.0f} tokens, "
        f"predicted {scores.growth_told_mean_tokens:,.0f}"
    )
    title = f"{scores.num_turns:,} turns of held-out groups, {scores.num_last:,} of them the last of a job"
    return f"{_table(title, heads, lines)}\n{_filled(f'ended with {ends}; {growth}')}"


# ---- how fast ----


def _timing(timing: Timing) -> str:
    heads = [["microseconds on this machine", "median", "p95"]]
    lines = [
        _times("  observe", timing.observe),
        _times(f"  answer (goal: {ANSWER_GOAL_US})", timing.answer),
        _times("  answer, one call in ten censored", timing.answer_with_cut_off),
        _times("  observe, all tables full", timing.observe_when_full),
        _times("  answer, all tables full", timing.answer_when_full),
    ]
    if timing.answer_corrected is not None:
        lines.append(_times(f"  answer, corrected (goal: {CORRECTED_GOAL_US})", timing.answer_corrected))
    return _table("", heads, lines)


def _times(name: str, times: Microseconds) -> list[str]:
    return [name, f"{times.median:,.1f}", f"{times.p95:,.1f}"]


# ---- layout ----


def _table(title: str, heads: list[list[str]], lines: list[list[str]]) -> str:
    text = aligned([*heads, *lines], gap=" ")
    rule = "-" * max(map(len, text))
    return "\n".join([*filter(None, [title]), *text[: len(heads)], rule, *text[len(heads) :]])


def _ratio(interval: Interval | None, digits: int = 2) -> str:
    if interval is None:
        return NOTHING
    form = f".{digits}f" if interval.value >= 0.1 else ".2g"
    return f"{interval.value:{form}}x {interval.low:{form}}-{interval.high:{form}}"


def _difference(interval: Interval) -> str:
    """Formats a difference in percentage points."""
    value = 100 * interval.value
    low = 100 * interval.low
    high = 100 * interval.high
    return f"{value:+.1f} [{low:+.1f} {high:+.1f}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _notes(notes: Sequence[str]) -> str:
    return "\n".join(
        textwrap.fill(note, MAX_WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        for note in notes
    )


def _filled(text: str) -> str:
    return textwrap.fill(text, MAX_WIDTH, break_on_hyphens=False)

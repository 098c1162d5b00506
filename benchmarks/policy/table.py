"""Formats the grid as text: a table per cell, the mean over all cells, the promises. Pure functions."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence

from benchmarks.policy.cell import (
    BASELINE,
    Cell,
    first_wait_s,
    grid_ratio,
    max_jct_s,
    mean_jct_s,
    p95_jct_s,
    p99_jct_s,
    returning_p99_s,
)
from benchmarks.policy.promises import Promise, with_interval
from eval.report.figures import count, seconds
from eval.report.intervals import Estimate
from eval.report.tables import MAX_WIDTH, NOTHING, aligned

_HEAD = ["policy", "JCT s", "(95 %)", "JCT", "JCT", "JCT", "return s", "first s", "empted", "waste %"]


def cell_table(cell: Cell, base: str = BASELINE) -> str:
    """Returns a row per policy; ratios are to ``base``."""
    short = "short" if cell.is_short else "not short"
    title = f"{cell.title}: memory is {short}, fcfs computes {cell.again_share:.0%} of prompt tokens again"
    above = ["", "mean", f"ratio to {base}", "p95", "p99", "longest", "p99 TTFT", "longest", "pre-", "in"]
    lines = aligned([above, _HEAD, *(_line(cell, policy, base) for policy in cell.runs)], gap="  ")
    return "\n".join([title, *lines[:2], "-" * max(map(len, lines)), *lines[2:]])


def _line(cell: Cell, policy: str, base: str) -> list[str]:
    runs = cell.runs[policy]
    tails = (p95_jct_s, p99_jct_s, max_jct_s)
    return [
        policy,
        seconds(statistics.fmean(map(mean_jct_s, runs))),
        with_interval(cell.ratio(policy, mean_jct_s, base)),
        *(_short_ratio(cell.ratio(policy, measure, base)) for measure in tails),
        seconds(statistics.fmean(map(returning_p99_s, runs))),
        seconds(max(map(first_wait_s, runs))),
        count(statistics.fmean(run.num_preemptions or 0 for run in runs)),
        f"{statistics.fmean(100 * (run.held_in_vain_share or 0.0) for run in runs):.1f}",
    ]


def _short_ratio(ratio: Estimate | None) -> str:
    return NOTHING if ratio is None else f"{ratio.value:.2f}"


def notes(base: str = BASELINE) -> str:
    """Explains the heads of the tables."""
    told = (
        f"JCT: job completion time; its p95, p99 and longest as ratios to {base}, paired by seed",
        "first: a job's first turn, to its first token",
        "waste: pool x time held by pins that no turn took over",
    )
    return "\n".join(_wrapped("- ", note) for note in told)


def grid_table(cells: Sequence[Cell], base: str = BASELINE) -> str:
    """Returns every policy's mean over all cells, and over the cells of each tier that ran."""
    tiers = (
        ("without a host tier", [cell for cell in cells if not cell.host_tier]),
        ("with a host tier", [cell for cell in cells if cell.host_tier]),
    )
    choices = (("all cells", cells), *(tier for tier in tiers if tier[1]))
    head = ["policy", *(f"{name} ({len(chosen)})" for name, chosen in choices)]
    body = [
        [policy, *(with_interval(grid_ratio(chosen, policy, base)) for _, chosen in choices)]
        for policy in cells[0].runs
    ]
    lines = aligned([head, *body], gap="  ")
    title = f"mean JCT over that of {base}, geometric mean over cells (95 %)"
    return "\n".join([title, lines[0], "-" * max(map(len, lines)), *lines[1:]])


def promise_list(subject: str, promises: Sequence[Promise]) -> str:
    """Lists each promise, kept or not, with its figure."""
    kept = sum(promise.kept is True for promise in promises)
    judged = sum(promise.kept is not None for promise in promises)
    lines = [f"promises of {subject}, {kept} of {judged} kept (ratios are judged to 0.1 %):"]
    lines += [_wrapped(f"{_verdict(one):8}  ", f"{one.text}: {one.figure}") for one in promises]
    return "\n".join(lines)


def _verdict(promise: Promise) -> str:
    if promise.kept is None:
        return "open"
    return "kept" if promise.kept else "NOT kept"


def _wrapped(mark: str, text: str) -> str:
    return textwrap.fill(
        text,
        MAX_WIDTH,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_on_hyphens=False,
    )

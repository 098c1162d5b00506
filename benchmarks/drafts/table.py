"""Formats the tallies of a replay as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.drafts.contenders import SUFFIX
from benchmarks.drafts.replay import Replayed, Tally
from benchmarks.drafts.texts import TurnKind

GOALS = ((TurnKind.WRITE, 2.5), (None, 1.5))
"""Tokens per step of the suffix drafter; None: over all turns."""
_HEAD = ("drafter", "turns", "tokens per step", "drafted per token", "accepted", "drafting, us per token")


def table(replayed: Sequence[Replayed]) -> str:
    """Returns one row per contender and kind of turn, in Markdown."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|---|--:|--:|--:|--:|"]
    for one in replayed:
        for kind, tally in _rows(one):
            if tally.tokens:
                lines.append(_line(one.name, kind, tally))
    return "\n".join(lines)


def goals(replayed: Sequence[Replayed]) -> str:
    """Returns a line per goal: whether the suffix drafter meets it."""
    subject = next(one for one in replayed if one.name == SUFFIX)
    lines = []
    for kind, goal in GOALS:
        tally = subject.total if kind is None else subject.by_kind[kind]
        verdict = "met" if tally.tokens_per_step >= goal else "MISSED"
        lines.append(f"{verdict}: {kind or 'all'}, {tally.tokens_per_step:.2f} tokens per step, goal {goal}")
    return "\n".join(lines)


def as_json(replayed: Sequence[Replayed]) -> list[dict[str, Any]]:
    """Returns counts only: times differ from run to run."""
    return [
        {
            "drafter": one.name,
            "turns": kind,
            "num_turns": tally.turns,
            "steps": tally.steps,
            "tokens": tally.tokens,
            "drafted": tally.drafted,
            "accepted": tally.accepted,
            "steps_by_drafts": _by_drafts(one, kind),
        }
        for one in replayed
        for kind, tally in _rows(one)
    ]


def _rows(one: Replayed) -> list[tuple[str, Tally]]:
    return [*((kind.value, tally) for kind, tally in one.by_kind.items()), ("all", one.total)]


def _by_drafts(one: Replayed, kind: str) -> list[tuple[int, int, int]]:
    """Returns (drafts, accepted drafts, number of such steps), sorted."""
    counts: Counter[tuple[int, int]] = Counter()
    for own, of_kind in one.steps_by_drafts.items():
        if kind in ("all", own.value):
            counts.update(of_kind)
    return [(drafts, accepted, steps) for (drafts, accepted), steps in sorted(counts.items())]


def _line(name: str, kind: str, tally: Tally) -> str:
    accepted = "-" if tally.acceptance is None else f"{tally.acceptance:.0%}"
    drafted = tally.drafted / tally.tokens
    cells = f"{tally.tokens_per_step:.2f} | {drafted:.2f} | {accepted} | {tally.us_per_token:.0f}"
    return f"| {name} | {kind} | {cells} |"

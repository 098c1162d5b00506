"""The features of a tool call for a regressor: the estimator's prediction and its job's past calls.

Pure functions, so that a recording and a running core give the same rows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from estimator.plain_math import log, log1p
from estimator.survival import SurvivalCurve
from estimator.tool_key import ToolKey

LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
"""The levels of the quantiles that are corrected."""
MEDIAN = LEVELS.index(0.5)
FLOOR_S = 0.001
"""Added before taking a logarithm, since a call may take no time."""
FEATURES = (
    *(f"ln of the {level} quantile" for level in LEVELS),
    "ln of observations behind them",
    "calls of the program in the job",
    "the last of them, ln beyond the median",
    "the longest of them, ln beyond the median",
    "calls in the job",
    "the last of those, ln beyond the median",
    "turns before this one",
    "calls in parallel",
    "ln of tokens of the prompt",
    "ln of generated tokens",
)
PROGRAM_PARTS = 2
"""Number of key parts that identify a program: the tool, and what it ran."""


class CallFacts(NamedTuple):
    """What is known about a turn when its calls begin."""

    num_turns: int
    """Number of turns of the job before it."""
    num_parallel: int
    num_prompt_tokens: int
    num_output_tokens: int


class PastCall(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A call that has ended, for the trainer."""

    group: str
    """Jobs of one group resemble each other: see ``PastJob``."""
    kind: str
    """The tool."""
    row: tuple[float, ...]
    log_s: float
    """Logarithm of its duration."""


def log_of(seconds: float) -> float:
    return log(seconds + FLOOR_S)


def kind_of(key: ToolKey) -> str:
    """The tool of a key."""
    return key.parts[0] if key.parts else ""


def log_quantiles(curve: SurvivalCurve) -> list[float]:
    """Logarithms of the curve's quantiles at ``LEVELS``; quantiles in the unknown tail are replaced by the
    longest duration seen."""
    quantiles_s = [curve.quantile(level) for level in LEVELS]
    longest_s = curve.support[-1] if math.isinf(quantiles_s[-1]) else 0.0
    return [log_of(longest_s if math.isinf(each) else each) for each in quantiles_s]


class _Seen:
    """Calls of one program in a job."""

    __slots__ = ("last", "longest", "num")

    def __init__(self) -> None:
        self.num = 0
        self.last = self.longest = 0.0

    def add(self, log_s: float) -> None:
        self.last = log_s
        self.longest = log_s if not self.num else max(self.longest, log_s)
        self.num += 1


class CallHistory:
    """The calls of one job so far."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], _Seen] = {}
        """Calls by program; the empty name has all calls."""

    def add(self, key: ToolKey, seconds: float) -> None:
        """Adds a call that has ended."""
        log_s = log_of(seconds)
        for name in {key.parts[:PROGRAM_PARTS], ()}:
            self._seen.setdefault(name, _Seen()).add(log_s)

    def row(self, curve: SurvivalCurve, key: ToolKey, facts: CallFacts) -> list[float] | None:
        """The features of a call that begins [len(FEATURES)]; None if the estimator knows nothing. ``curve``
        is the estimator's prediction."""
        if not curve.num_observations or not curve.support:
            return None
        row = log_quantiles(curve)
        median = row[MEDIAN]
        row.append(log1p(curve.num_observations))
        same = self._seen.get(key.parts[:PROGRAM_PARTS])
        every = self._seen.get(())
        row += [0.0, 0.0, 0.0] if same is None else [same.num, same.last - median, same.longest - median]
        row += [0.0, 0.0] if every is None else [every.num, every.last - median]
        row += [float(facts.num_turns), float(facts.num_parallel)]
        row += [log1p(facts.num_prompt_tokens), log1p(facts.num_output_tokens)]
        return row

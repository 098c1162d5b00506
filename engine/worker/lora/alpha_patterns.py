"""``alpha_pattern`` of an adapter.

Its patterns are untrusted, and peft runs them as regular expressions. Here they are names with wildcards,
matched in linear time. All other patterns are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_WILDCARDS = 256
_WILDCARD = re.compile(r"\*|\.\*|\[0-9\]\+?|\\d\+?")
_PLAIN_NAME = re.compile(r"[\w.-]+")


Pieces = tuple[tuple[str, str], ...]
"""Literal texts, each with the wildcard after it."""


@dataclass(frozen=True, slots=True)
class AlphaPatterns:
    """Values for linears, by the end of their names."""

    names: Mapping[str, tuple[int, float]]
    """Plain names, each with its index among all patterns: the first match wins, as in peft."""
    wildcards: Sequence[tuple[int, Pieces, float]]
    default: float

    @classmethod
    def of(cls, patterns: Mapping[str, Any], default: float) -> AlphaPatterns:
        """Parse patterns. ValueError, with the reason, for a pattern that is not a name with wildcards."""
        names: dict[str, tuple[int, float]] = {}
        wildcards: list[tuple[int, Pieces, float]] = []
        for place, (pattern, value) in enumerate(patterns.items()):
            plain = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
            if _PLAIN_NAME.fullmatch(plain):
                names.setdefault(plain, (place, float(value)))
                continue
            pieces = _pieces(plain)
            if pieces is None or len(wildcards) == MAX_WILDCARDS:
                what = f"alpha_pattern holds {pattern[:80]!r}, which is no name with *, [0-9] or \\d"
                many = f"alpha_pattern holds more than {MAX_WILDCARDS} patterns with wildcards"
                raise ValueError(what if pieces is None else many)
            wildcards.append((place, pieces, float(value)))
        return cls(names, wildcards, float(default))

    def value(self, name: str) -> float:
        """The value of the first pattern that matches the end of a linear's name."""
        parts = f"model.{name}".split(".")
        ends = [".".join(parts[start:]) for start in range(len(parts))]
        fits = [self.names[end] for end in ends if end in self.names]
        fits += [
            (place, value)
            for place, pieces, value in self.wildcards
            if any(_fits(pieces, end) for end in ends)
        ]
        return min(fits)[1] if fits else self.default


def _pieces(pattern: str) -> Pieces | None:
    """Literal texts, each with the wildcard after it; None if the pattern contains anything else."""
    pieces = []
    start = 0
    for found in _WILDCARD.finditer(pattern):
        pieces.append((pattern[start : found.start()], found.group()))
        start = found.end()
    pieces.append((pattern[start:], ""))
    is_plain = all(literal == "" or _PLAIN_NAME.fullmatch(literal) for literal, _ in pieces)
    return tuple(pieces) if is_plain else None


def _fits(pieces: Sequence[tuple[str, str]], name: str) -> bool:
    """Whether the pieces match a whole name, with any length that each wildcard allows."""
    reached = {0}
    for literal, wildcard in pieces:
        behind = {at + len(literal) for at in reached if name.startswith(literal, at)}
        reached = {end for at in behind for end in _ends(name, at, wildcard)}
    return len(name) in reached


def _ends(name: str, at: int, wildcard: str) -> Iterable[int]:
    """The places where a wildcard that begins at ``at`` may end."""
    if wildcard == "":
        return (at,)
    if wildcard.endswith("*"):
        return range(at, len(name) + 1)
    num_digits = len(name) - at - len(name[at:].lstrip("0123456789"))
    most = num_digits if wildcard.endswith("+") else min(num_digits, 1)
    return range(at + 1, at + most + 1)

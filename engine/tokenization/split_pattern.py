"""Proves which characters can be adjacent in one match of a pattern with which a pre-tokenizer splits texts.
It does not know tokenizers.

The pattern is parsed into the positions of a match that represent one character each, and the positions that
may follow each of them (Glushkov's automaton). Characters that a lookahead examines count as following.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_QUANTIFIER = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})[+?]?")
_ESCAPE = re.compile(r"\\(?:[pP](?:\{[^}]*\}|\w)|x\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)", re.DOTALL)
_NOT_ONE_CHARACTER = frozenset("ABbGgKkRXyYZz123456789")
"""Escapes that represent a position, an earlier group, or several characters."""
_GROUPS = ("(?:", "(?i:", "(?>", "(?=", "(?!", "(")


class PatternError(Exception):
    """The pattern contains a construct that this module does not support."""


@dataclass(slots=True)
class _Part:
    """A part of the pattern: whether it may be empty, and the positions with which its matches begin and
    end."""

    nullable: bool = True
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)


class SplitPattern:
    """A pattern of the tokenizers library; PatternError if it looks back, or at the end of the text."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._classes: list[str] = []
        """For each position, a pattern of the one character that it represents."""
        self._follow: list[set[int]] = []
        self._whole = self._choice(ignores_case=False)
        if self._at != len(pattern):
            raise PatternError(pattern)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yields patterns of two characters that may be adjacent in a match, or at its end and after it."""
        for place, followers in enumerate(self._follow):
            for follower in followers:
                yield self._classes[place], self._classes[follower]

    def has_pair(self, left: str, right: str) -> bool:
        """Whether a character of ``left`` may be followed by one of ``right`` in the text that a match
        examines."""
        found: dict[tuple[str, str], bool] = {}

        def holds_one(one: str, characters: str) -> bool:
            key = (one, characters)
            if key not in found:
                found[key] = rest_of(one, characters) != characters
            return found[key]

        return any(holds_one(one, left) and holds_one(other, right) for one, other in self.pairs())

    def takes_each(self, characters: str) -> bool:
        """Whether each of these characters alone is a match."""
        alone = [self._classes[place] for place in self._whole.first & self._whole.last]
        return bool(alone) and rest_of("|".join(alone), characters) == ""

    # ---- the parser ----

    def _choice(self, ignores_case: bool) -> _Part:
        part = self._sequence(ignores_case)
        while self._take("|"):
            other = self._sequence(ignores_case)
            part = _Part(part.nullable or other.nullable, part.first | other.first, part.last | other.last)
        return part

    def _sequence(self, ignores_case: bool) -> _Part:
        whole = _Part()
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            part = self._repeated(self._atom(ignores_case))
            self._link(whole.last, part.first)
            whole = _Part(
                whole.nullable and part.nullable,
                whole.first | part.first if whole.nullable else whole.first,
                whole.last | part.last if part.nullable else part.last,
            )
        return whole

    def _repeated(self, part: _Part) -> _Part:
        while found := _QUANTIFIER.match(self._pattern, self._at):
            self._at = found.end()
            self._link(part.last, part.first)
            least = found[1] if found[0][0] == "{" else ("1" if found[0][0] == "+" else "0")
            part = _Part(part.nullable or int(least or "0") == 0, part.first, part.last)
        return part

    def _atom(self, ignores_case: bool) -> _Part:
        character = self._pattern[self._at]
        if character == "(":
            return self._group(ignores_case)
        if character in "^$*+?{":
            raise PatternError(self._pattern)
        end = self._end_of_class() if character == "[" else self._at + 1
        if character == "\\":
            end = self._end_of_escape()
        one = self._pattern[self._at : end]
        self._at = end
        return self._place(f"(?i:{one})" if ignores_case else one)

    def _group(self, ignores_case: bool) -> _Part:
        kind = next(kind for kind in _GROUPS if self._pattern.startswith(kind, self._at))
        self._at += len(kind)
        if self._pattern.startswith("?", self._at):  # a look-behind, a name, or an option
            raise PatternError(self._pattern)
        inside = self._choice(ignores_case or kind == "(?i:")
        if not self._take(")"):
            raise PatternError(self._pattern)
        if kind not in ("(?=", "(?!"):
            return inside
        if self._at < len(self._pattern) and self._pattern[self._at] not in "|)":  # limits what may come next
            raise PatternError(self._pattern)
        return _Part(True, inside.first, set())

    def _end_of_class(self) -> int:
        depth = 0
        at = self._at
        while at < len(self._pattern):
            character = self._pattern[at]
            at += 2 if character == "\\" else 1
            depth += (character == "[") - (character == "]")
            if depth == 0:
                return at
        raise PatternError(self._pattern)

    def _end_of_escape(self) -> int:
        found = _ESCAPE.match(self._pattern, self._at)
        if found is None or found[0][1] in _NOT_ONE_CHARACTER:
            raise PatternError(self._pattern)
        return found.end()

    def _place(self, one: str) -> _Part:
        place = len(self._classes)
        self._classes.append(one)
        self._follow.append(set())
        return _Part(False, {place}, {place})

    def _link(self, last: set[int], first: set[int]) -> None:
        for place in last:
            self._follow[place] |= first

    def _take(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found


def rest_of(pattern: str, text: str) -> str:
    """The text in which the library itself finds no match of the pattern."""
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(f"(?:{pattern})+"), "removed")
    return "".join(piece for piece, _ in split.pre_tokenize_str(text))

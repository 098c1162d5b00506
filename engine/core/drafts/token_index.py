"""What followed the last 1, 2, 4 and 8 tokens before, in a text that grows and may be cut.

For each such context the token that last held its ground behind it is kept, and how often it did: the
predictor of branches of Seznec and Michaud ("A case for (partially) TAgged GEometric history length branch
prediction", 2006), with tokens in the place of branches. A token is added, taken back and predicted by one
look-up per length: no chain is walked, no tree is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CONTEXTS = (1, 2, 4, 8)
"""Lengths of contexts, in tokens."""
MAX_COUNT = 7
"""A token that followed its context more often than this in a row counts as this often."""
RATES = (
    (0.16, 0.33, 0.49, 0.56, 0.66, 0.71, 0.76, 0.91),
    (0.30, 0.54, 0.67, 0.73, 0.80, 0.83, 0.86, 0.95),
    (0.55, 0.76, 0.83, 0.86, 0.90, 0.90, 0.93, 0.97),
    (0.79, 0.91, 0.94, 0.94, 0.96, 0.96, 0.97, 0.99),
)
"""For each length of context, by count: how often the token was right, in recorded texts of agents
(`python -m benchmarks.drafts`)."""
_SHIFT = 3
"""Bits of a count: a token and its count are one number."""


class Prediction(NamedTuple):
    """A token that may come next."""

    token_id: int
    rate: float
    """How often such a prediction is right."""


class TokenIndex:
    """Tokens, and what followed each short run of them."""

    def __init__(self, longest: int = CONTEXTS[-1]) -> None:
        """No context is longer than ``longest`` tokens."""
        self.tokens: list[int] = []
        self._levels = [_Level(context) for context in CONTEXTS if context <= longest]
        self._tables = [level.latest for level in self._levels]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        start = len(self.tokens)
        self.tokens += token_ids
        for level in self._levels:
            level.extend(self.tokens, start)

    def cut(self, num_tokens: int) -> None:
        """Keep only the first so many tokens: all is as if the others had never been there."""
        for level in self._levels:
            level.cut(self.tokens, num_tokens)
        del self.tokens[num_tokens:]

    def predict(self, keys: Sequence[int]) -> Prediction | None:
        """The likeliest token behind a sequence of these ``context_keys``; None if its last token is new."""
        best, best_rate = None, 0.0
        for latest, rates, key in zip(self._tables, RATES, keys, strict=False):
            entry = latest.get(key)
            if entry is None:
                break
            rate = rates[entry & MAX_COUNT]
            if rate > best_rate:
                best, best_rate = entry >> _SHIFT, rate
        return None if best is None else Prediction(best, best_rate)


def context_keys(end: Sequence[int]) -> list[int]:
    """What the contexts at the end of a sequence are looked up by, the shortest first."""
    last = tuple(end[-CONTEXTS[-1] :])
    return [hash(last[-context:]) for context in CONTEXTS if context <= len(last)]


class _Level:
    """Contexts of one length."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.latest: dict[int, int] = {}
        """Token that holds its ground behind a context, with its count, by the hash of the context."""
        self._replaced: list[int | None] = []
        """What the token at each place behind the first ``context`` replaced."""

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Take the tokens from ``start`` on."""
        context, latest, replaced = self.context, self.latest, self._replaced
        for place in range(max(start, context), len(tokens)):
            key = hash(tuple(tokens[place - context : place]))
            old = latest.get(key)
            replaced.append(old)
            token_id = tokens[place]
            if old is None:
                latest[key] = token_id << _SHIFT
            elif old >> _SHIFT == token_id:
                latest[key] = old if old & MAX_COUNT == MAX_COUNT else old + 1
            else:
                count = (old & MAX_COUNT) >> 1
                latest[key] = (old >> _SHIFT << _SHIFT) + count if count else token_id << _SHIFT

    def cut(self, tokens: Sequence[int], num_tokens: int) -> None:
        """Take back the tokens behind the first ``num_tokens``, the last first."""
        context, latest, replaced = self.context, self.latest, self._replaced
        for place in range(len(tokens) - 1, max(num_tokens, context) - 1, -1):
            key, old = hash(tuple(tokens[place - context : place])), replaced.pop()
            if old is None:
                del latest[key]
            else:
                latest[key] = old

"""Predicts the next token from the last 1, 2, 4 and 8 tokens, in a text that grows and may be cut.

Each context keeps one token that followed it, and a count of how often that was right: the branch predictor
of Seznec and Michaud ("A case for (partially) TAgged GEometric history length branch prediction", 2006), with
tokens in place of branches. Adding, removing and predicting a token take one look-up per length, without
walking a chain or a tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CONTEXTS = (1, 2, 4, 8)
"""Lengths of contexts, in tokens."""
MAX_COUNT = 7
"""Largest count: it stops growing when the token follows its context more often."""
RATES = (
    (0.16, 0.33, 0.49, 0.56, 0.66, 0.71, 0.76, 0.91),
    (0.30, 0.54, 0.67, 0.73, 0.80, 0.83, 0.86, 0.95),
    (0.55, 0.76, 0.83, 0.86, 0.90, 0.90, 0.93, 0.97),
    (0.79, 0.91, 0.94, 0.94, 0.96, 0.96, 0.97, 0.99),
)
"""Accuracy by length of context and count, measured on recorded texts of agents
(`python -m benchmarks.drafts`)."""
_SHIFT = 3
"""Bits of a count; a token and its count are stored as one number."""


class Prediction(NamedTuple):
    """A token that may come next."""

    token_id: int
    rate: float
    """How often such a prediction is right."""


class TokenIndex:
    """A text, and the token that follows each short context in it."""

    def __init__(self, longest: int = CONTEXTS[-1]) -> None:
        """Use contexts of at most ``longest`` tokens."""
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
        """Keep only the first ``num_tokens`` tokens, as if the others had never been added."""
        for level in self._levels:
            level.cut(self.tokens, num_tokens)
        del self.tokens[num_tokens:]

    def predict(self, keys: Sequence[int]) -> Prediction | None:
        """The likeliest token after a sequence with these ``context_keys``; None if its last token is new."""
        best = None
        best_rate = 0.0
        for latest, rates, key in zip(self._tables, RATES, keys, strict=False):
            entry = latest.get(key)
            if entry is None:
                break
            rate = rates[entry & MAX_COUNT]
            if rate > best_rate:
                best = entry >> _SHIFT
                best_rate = rate
        return None if best is None else Prediction(best, best_rate)


def context_keys(end: Sequence[int]) -> list[int]:
    """The look-up keys of the contexts at the end of a sequence, the shortest first."""
    last = tuple(end[-CONTEXTS[-1] :])
    return [hash(last[-context:]) for context in CONTEXTS if context <= len(last)]


class _Level:
    """Contexts of one length."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.latest: dict[int, int] = {}
        """The token predicted after a context, with its count, by the hash of the context."""
        self._replaced: list[int | None] = []
        """The entry that the token at each place replaced, from place ``context`` on."""

    def extend(self, tokens: Sequence[int], start: int) -> None:
        """Add the tokens from ``start`` on."""
        context = self.context
        latest = self.latest
        replaced = self._replaced
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
        """Remove the tokens after the first ``num_tokens``, the last first."""
        context = self.context
        latest = self.latest
        replaced = self._replaced
        for place in range(len(tokens) - 1, max(num_tokens, context) - 1, -1):
            key = hash(tuple(tokens[place - context : place]))
            old = replaced.pop()
            if old is None:
                del latest[key]
            else:
                latest[key] = old

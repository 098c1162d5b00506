"""V1's prompt look-up: proposes the tokens that followed an earlier occurrence of the last n tokens.

After Saxena, "Prompt Lookup Decoding" (2023). It keeps no state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import mul

from engine.core.drafts.proposal import NOTHING, Proposal
from engine.core.request import Request

MAX_TOKENS_SEARCHED = 16_384
"""Number of last tokens that are searched; a search visits all of them."""
RATE = 0.8
"""Chance of a token after an accepted one; a request's own acceptance corrects it."""


class NgramDrafter:
    """Finds the first earlier occurrence of the longest n-gram at the end of a request."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        """Look for n-grams of ``max_tokens`` down to ``min_tokens``."""
        self._min = min_tokens
        self._max = max_tokens

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        tokens = request.all_token_ids[-MAX_TOKENS_SEARCHED:]
        drafts = _continuation(tokens, self._min, self._max, max_tokens)
        return Proposal(drafts, list(accumulate(repeat(RATE, len(drafts)), mul))) if drafts else NOTHING

    def ended(self, request: Request) -> None:
        """Do nothing: no state is kept."""


def _continuation(tokens: list[int], shortest: int, longest: int, max_tokens: int) -> list[int]:
    """The tokens after the first earlier occurrence of the longest n-gram that ends ``tokens``."""
    best = 0
    after = 0
    last = tokens[-1]
    place = tokens.index(last) + 1
    while place < len(tokens):
        length = _common_end(tokens, place, longest)
        if length > best:
            best = length
            after = place
            if length == longest:
                break
        place = tokens.index(last, place) + 1
    return tokens[after : after + max_tokens] if best >= shortest else []


def _common_end(tokens: Sequence[int], place: int, most: int) -> int:
    """How many tokens before ``place``, at most ``most``, equal those at the end; the last one does."""
    length = 1
    most = min(most, place)
    while length < most and tokens[place - 1 - length] == tokens[-1 - length]:
        length += 1
    return length

"""Whether a text between tags that follows a client's grammar can end.

The library reads each part of a text as long as possible. If a grammar's last part may be any text, it also
takes the tag that follows: nothing can come after that, and the call would never end.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

_NUM_WALKS = 4
_NUM_TOKENS = 48
_NUM_ENDS = 3
"""Number of the last positions of a walk where the text may end that are examined."""


def can_end(text: LLMatcher, ended: LLMatcher, ends: Sequence[Sequence[int]], not_text: list[int]) -> bool:
    """Whether texts of a grammar can end where the grammar allows it, tested with a few random ones; True if
    none of them reaches an end.

    ``ended``: the same grammar, followed by the tag. ``ends``: ways to write the tag. ``not_text``: tokens
    that are not text.
    """
    chance = random.Random(0)
    return all(_walk(text.deep_copy(), ended.deep_copy(), ends, not_text, chance) for _ in range(_NUM_WALKS))


def _walk(
    text: LLMatcher,
    ended: LLMatcher,
    ends: Sequence[Sequence[int]],
    not_text: list[int],
    chance: random.Random,
) -> bool:
    places: list[bool] = []
    for _ in range(_NUM_TOKENS):
        if text.is_accepting():
            places.append(any(_ends(ended.deep_copy(), end) for end in ends))
        allowed = np.unpackbits(np.frombuffer(text.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed[not_text] = 0
        (token_ids,) = allowed.nonzero()
        if text.is_stopped() or not len(token_ids):
            break
        token_id = int(token_ids[chance.randrange(len(token_ids))])
        if not ended.consume_token(token_id) or not text.consume_token(token_id):
            break  # the tag has begun
    return not places or any(places[-_NUM_ENDS:])


def _ends(matcher: LLMatcher, end: Sequence[int]) -> bool:
    return all(map(matcher.consume_token, end)) and matcher.is_accepting()

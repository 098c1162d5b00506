"""An index predicts the same as a plain count over all its tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.drafts.token_index import (
    CONTEXTS,
    MAX_COUNT,
    RATES,
    Prediction,
    TokenIndex,
    context_keys,
)

FEW_TOKENS = st.lists(st.integers(0, 3), max_size=40)


def plain_prediction(tokens: Sequence[int], end: Sequence[int]) -> Prediction | None:
    """Walks all tokens for each length of context."""
    best: Prediction | None = None
    for rates, context in zip(RATES, CONTEXTS, strict=True):
        held: int | None = None
        count = 0
        for place in range(context, len(tokens)):
            if len(end) < context or tokens[place - context : place] != end[len(end) - context :]:
                continue
            if held == tokens[place]:
                count = min(count + 1, MAX_COUNT)
            elif held is None or count < 2:
                held, count = tokens[place], 0
            else:
                count //= 2
        if held is not None and (best is None or rates[count] > best.rate):
            best = Prediction(held, rates[count])
    return best


@given(FEW_TOKENS, FEW_TOKENS)
def test_predictions_are_those_of_a_plain_count(tokens: list[int], end: list[int]) -> None:
    """Predictions equal the plain count's for any text and context."""
    index = TokenIndex()
    index.extend(tokens)
    assert index.predict(context_keys(end)) == plain_prediction(tokens, end)
    own_end = tokens[-10:]
    assert index.predict(context_keys(own_end)) == plain_prediction(tokens, own_end)


@settings(max_examples=200)
@given(st.lists(st.one_of(FEW_TOKENS, st.integers(0, 60)), max_size=8), FEW_TOKENS)
def test_what_is_cut_off_leaves_no_trace(steps: list[list[int] | int], end: list[int]) -> None:
    """After any appends and cuts, an index equals one built from the remaining text."""
    index, tokens = TokenIndex(), list[int]()
    for step in steps:
        if isinstance(step, int):
            kept = min(step, len(tokens))
            index.cut(kept)
            del tokens[kept:]
        else:
            index.extend(step)
            tokens += step
    assert index.tokens == tokens
    assert index.predict(context_keys(end)) == plain_prediction(tokens, end)
    index.cut(0)
    assert all(index.predict(context_keys([token])) is None for token in range(4))


def test_a_shorter_longest_context_is_kept_to() -> None:
    """With contexts of at most two tokens, longer ones are ignored."""
    text = [1, 2, 3, 4, 9, 9, 3, 4, 8, 3, 4, 8, 1, 2, 3, 4]
    short, long = TokenIndex(longest=2), TokenIndex()
    short.extend(text)
    long.extend(text)
    keys = context_keys(text)
    found, other = short.predict(keys), long.predict(keys)
    assert found is not None
    assert other is not None
    assert (found.token_id, other.token_id) == (8, 9)

"""The lower bound of a text's tokens: never more than it has, and none where that is not certain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers

from engine.tokenization.token_bounds import TokenBounds
from tests.tokenization.test_prompt_encoder import (
    byte_level,
    byte_level_with_prefix_space,
    hostile,
    metaspace,
    word_piece,
)


def byte_fallback() -> Tokenizer:
    """Like Llama 2's: pieces of characters, and bytes for characters that are in none."""
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab", "▁abab", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁ab", "ab")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


CHARACTERS = ["The user", " files", "Öde Straße", "e\u0301", "\u0301", "\u1100\u1161\u11a8", "\u2126", "😀"]
OTHERS = ["  ", "\n\n", "abab", " abab", "<s>", "<|im_end|>", "<tool_call>", "\x00", "1234"]
TEXTS = st.lists(st.sampled_from(CHARACTERS + OTHERS)).map("".join)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_no_text_has_fewer_tokens_than_its_length_says(make: Callable[[], Tokenizer]) -> None:
    """For composed characters, special tokens and characters in bytes the bound is never too high."""
    backend = make()
    reach = TokenBounds.of(backend)
    assert reach is not None

    @given(TEXTS)
    def check(text: str) -> None:
        count = len(backend.encode(text, add_special_tokens=False).ids)
        assert reach.fewest_tokens(text) <= count
        assert not reach.exceeds(text, count)

    check()


@pytest.mark.parametrize(("make", "longest"), [(byte_level, "<|im_start|>"), (byte_fallback, " abab")])
def test_a_text_of_the_longest_tokens_is_not_refused(make: Callable[[], Tokenizer], longest: str) -> None:
    """A text of the longest tokens has exactly as many as the bound says; one character more raises it."""
    backend = make()
    reach = TokenBounds.of(backend)
    assert reach is not None
    text = longest * 50
    assert not reach.exceeds(text, len(backend.encode(text, add_special_tokens=False).ids))
    assert reach.exceeds("x" * (reach.longest * 50 + 1), 50)


@pytest.mark.parametrize(
    "make",
    [byte_level_with_prefix_space, metaspace("always"), word_piece, hostile],
    ids=["takes in spaces", "unknown pieces", "words of any length", "takes in more"],
)
def test_where_a_token_may_stand_for_any_length_nothing_is_said(make: Callable[[], Tokenizer]) -> None:
    """A tokenizer has no bound if a token may stand for an unknown word or absorbs spaces around it."""
    assert TokenBounds.of(make()) is None

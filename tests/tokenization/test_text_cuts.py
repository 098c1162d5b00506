"""Long texts tokenized in parts: tokens equal those of the whole; without proof of that, no text is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine.errors import RequestError
from engine.tokenization.prompt_encoder import PromptEncoder
from engine.tokenization.split_pattern import PatternError, SplitPattern
from engine.tokenization.text_cuts import MAX_PART_CHARS, PART_CHARS, TextCuts
from eval.agent_model import folder
from tests.tokenization.test_prompt_encoder import (
    FRAGMENTS,
    byte_level,
    byte_level_with_prefix_space,
    hostile,
    metaspace,
    special,
    trained,
    word_piece,
)

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT_OSS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPACE = {"String": " "}


def split_by(*patterns: str) -> Callable[[], Tokenizer]:
    """Splits like models of this kind: the patterns one after the other, then bytes."""

    def make() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        added = [AddedToken("<tool_call>", normalized=False), AddedToken("a b", normalized=False)]
        return trained(tokenizer, [*special("<|im_start|>", "<|im_end|>"), *added])

    return make


def spaces_as_marks(prepends: bool) -> Callable[[], Tokenizer]:
    """Like Llama 2's or Gemma's: no words, spaces are letters, bytes for unknown characters."""

    def make() -> Tokenizer:
        words = [
            "▁",
            "t",
            "h",
            "e",
            "s",
            "a",
            "i",
            "d",
            "▁t",
            "▁th",
            "▁the",
            "sa",
            "sai",
            "said",
            "▁▁",
            "▁said",
        ]
        pieces = [*words, *(f"<0x{byte:02X}>" for byte in range(256))]
        merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("s", "a"), ("sa", "i"), ("sai", "d")]
        merges += [("▁", "▁"), ("▁", "said")]
        vocabulary = {piece: number for number, piece in enumerate(pieces)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
        replace = normalizers.Replace(" ", "▁")
        steps = [normalizers.Prepend("▁"), replace] if prepends else [replace]
        tokenizer.normalizer = normalizers.Sequence(steps)
        tokenizer.add_tokens(special("<s>", "<|im_start|>", "<|im_end|>"))
        return tokenizer

    return make


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": split_by(GPT2),
    "Qwen": split_by(QWEN),
    "gpt-oss": split_by(GPT_OSS),
    "DeepSeek": split_by(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK),
    "byte level": byte_level,
    "Llama 2": spaces_as_marks(prepends=True),
    "Gemma": spaces_as_marks(prepends=False),
    "the model in the box": lambda: Tokenizer.from_file(str(folder() / "tokenizer.json")),
}
WORDS = st.sampled_from(
    [
        "the",
        " the",
        "said",
        " said",
        "  ",
        " ",
        "\n",
        "\n\n",
        " \n",
        ".",
        ",",
        "x'll",
        "'s",
        "a b",
        "b",
        "12",
        "3",
        "1 2",
    ]
)
TEXTS = st.lists(st.one_of(FRAGMENTS, WORDS), min_size=1, max_size=40).map("".join)


@pytest.fixture(scope="module", params=MAKERS)
def backend(request: pytest.FixtureRequest) -> Tokenizer:
    return MAKERS[request.param]()


@pytest.fixture(scope="module")
def cuts(backend: Tokenizer) -> TextCuts:
    return TextCuts.of(backend)


@pytest.mark.slow
@settings(max_examples=250)
@given(text=TEXTS, part_chars=st.integers(1, 12))
def test_parts_have_the_tokens_of_the_whole(
    backend: Tokenizer, cuts: TextCuts, text: str, part_chars: int
) -> None:
    """Tokens equal those of the whole at the most possible cuts, with any text around a cut."""
    parts = list(cuts.parts(text, part_chars))
    tokens = [token for part in parts for token in backend.encode(part, add_special_tokens=False).ids]
    assert tokens == backend.encode(text, add_special_tokens=False).ids, parts


def test_an_ordinary_text_is_cut_into_parts_of_bounded_length(backend: Tokenizer, cuts: TextCuts) -> None:
    """An ordinary text can be cut after nearly every word, with the tokens of the whole."""
    text = "<|im_start|>user\nThe user said: look at this file, and that one.\n" * 2500
    assert max(map(len, cuts.parts(text))) <= PART_CHARS + 100
    encoder = PromptEncoder.of(backend)
    assert encoder is not None
    assert encoder.encode(text) == backend.encode(text, add_special_tokens=False).ids
    assert [token for step in encoder.steps(text) for token in step] == encoder.encode(text)


def test_a_text_without_a_place_to_cut_is_bounded(backend: Tokenizer, cuts: TextCuts) -> None:
    """A word of a megabyte is one part; a longer one is refused in a sentence that names the limit."""
    assert len(list(cuts.parts("x" * MAX_PART_CHARS))) == 1
    with pytest.raises(RequestError, match=str(MAX_PART_CHARS)):
        list(cuts.parts("x" * (MAX_PART_CHARS + 1)))


@pytest.mark.parametrize(
    "make",
    [byte_level_with_prefix_space, metaspace("always"), word_piece, hostile, split_by(r"[^\n]+\n|.")],
    ids=["spaces put before", "likeliest pieces", "words of unknown letters", "whole words added", "lines"],
)
def test_where_nothing_is_proved_nothing_is_cut(make: Callable[[], Tokenizer]) -> None:
    """A tokenizer whose steps may look beyond a word gets whole texts."""
    assert TextCuts.of(make()) == TextCuts()


@pytest.mark.parametrize(
    ("pattern", "left", "right", "stands_together"),
    [
        (QWEN, "ab1", " \n.,", False),
        (QWEN, ".", "\n", True),
        (QWEN, " ", "a", True),
        (GPT_OSS, "a", "'", True),
        (GPT_OSS, "a", " .", False),
        (r"\p{L}+(?:-\p{L}+)*|.", "a", "-", True),
        (r"\p{L}+(?:-\p{L}+)*|.", "a", " ", False),
        (r"\p{L}+(?!\.)|.", "a", ".", True),
        (r"(?:[a-z] ?){2,3}|.", "a", " ", True),
        (r"(?i:foo bar)|\w", "O", " ", True),
        (r"[a-z&&[^x]]+|\s", "a", " ", False),
    ],
)
def test_what_may_stand_side_by_side_in_a_match(
    pattern: str, left: str, right: str, stands_together: bool
) -> None:
    """The pattern determines it: repeated groups, lookaheads, nested classes, letters of either case."""
    assert SplitPattern(pattern).has_pair(left, right) == stands_together


@pytest.mark.parametrize(
    "pattern", [r"(?<=a)b", r"^a", r"a\b", r"(a)\1", r"a$", r"(?=a)b", r"(a", r"[a", r"\X"]
)
def test_of_patterns_that_look_elsewhere_nothing_is_said(pattern: str) -> None:
    """A pattern that looks back, or at the text's ends, may match differently in a part."""
    with pytest.raises(PatternError):
        SplitPattern(pattern)

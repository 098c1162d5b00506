"""Prompts tokenized in pieces have the same tokens, and a growing conversation tokenizes only new text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from engine.tokenization.prompt_encoder import MAX_REMEMBERED_BYTES, PromptEncoder, cut_tokens
from engine.tokenization.tokenizer import Tokenizer as EngineTokenizer
from eval.agent_model import folder

CORPUS = [
    "The user's tool_call said: 12345 files, 6 folders.",
    "Öde Straße, café — déjà vu",
    "x = f(a, b)\n\n  y",
]
WORDS = Regex(r"'s|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+")
CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")


def special(*texts: str) -> list[AddedToken]:
    return [AddedToken(text, special=True, normalized=False) for text in texts]


def trained_bpe(added: list[AddedToken], dropout: float | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(dropout=dropout))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(tokenizer, added)


def trained(tokenizer: Tokenizer, added: list[AddedToken]) -> Tokenizer:
    model = tokenizer.model
    unknown = [text] if (text := getattr(model, "unk_token", None)) else []
    trainer: trainers.Trainer
    if isinstance(model, models.Unigram):
        trainer = trainers.UnigramTrainer(
            vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        )
    elif isinstance(model, models.WordPiece):
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=unknown, show_progress=False)
    else:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=unknown, initial_alphabet=alphabet, show_progress=False
        )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens(added)
    return tokenizer


def byte_level() -> Tokenizer:
    """Like Qwen's: NFC, a pattern, bytes; tool tokens next to the special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r"'s|\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return trained(tokenizer, [*special(*CHAT_TOKENS), AddedToken("<tool_call>", normalized=False)])


def byte_level_with_prefix_space() -> Tokenizer:
    """Like GPT-2's relatives: a space before each piece; a space before <mask> belongs to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    mask = AddedToken("<mask>", special=True, normalized=False, lstrip=True)
    return trained(tokenizer, [*special(*CHAT_TOKENS), mask])


def metaspace(scheme: str) -> Callable[[], Tokenizer]:
    """Like T5's and later Llamas': the space is a letter, which a text may begin with."""

    def make() -> Tokenizer:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        return trained(tokenizer, special("<s>", "</s>", *CHAT_TOKENS))

    return make


def prepending() -> Tokenizer:
    """Like Llama 2's: the space is a letter; there are no words."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trained(tokenizer, special("<s>", "</s>", "<unk>", *CHAT_TOKENS))
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def word_piece() -> Tokenizer:
    """Like BERT's: lower case, no accents; tokens before and after a text on request."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    mask = AddedToken("[MASK]", special=True, normalized=False, lstrip=True)
    trained(tokenizer, [*special("[CLS]", "[SEP]", *CHAT_TOKENS), mask])
    ids = tokenizer.get_vocab()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return tokenizer


def hostile() -> Tokenizer:
    """Added tokens that overlap others, contain others, or absorb the characters next to them."""
    tokenizer = trained_bpe(special(*CHAT_TOKENS))
    tokenizer.add_tokens(
        [
            *special("<a>", "<a><b>", "e><e", "<|im_end|>\n\n", "\n\n", " <e>", "<e>"),
            AddedToken("<l>", normalized=False, lstrip=True),
            AddedToken("<r>", normalized=False, rstrip=True),
            AddedToken("said", normalized=False, single_word=True),
            AddedToken("files", normalized=True, single_word=True),
            *special("<|end|>"),
        ]
    )
    return tokenizer


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, prefix space": byte_level_with_prefix_space,
    "metaspace, first": metaspace("first"),
    "metaspace, always": metaspace("always"),
    "metaspace, never": metaspace("never"),
    "prepending": prepending,
    "word piece": word_piece,
    "hostile": hostile,
}


@pytest.fixture(scope="module", params=[*MAKERS, "the model in the box"])
def backend(request: pytest.FixtureRequest) -> Tokenizer:
    maker = MAKERS.get(request.param)
    return maker() if maker else Tokenizer.from_file(str(folder() / "tokenizer.json"))


FRAGMENTS = st.sampled_from(
    [
        *(
            "The",
            "user",
            "'s",
            "said",
            " files",
            "12",
            "345",
            "Öde",
            "e\u0301",
            "\u0301",
            "é",
            "😀",
            "ﬁ",
            "▁",
            "_",
        ),
        *(
            " ",
            "  ",
            "\n",
            "\n\n",
            "\t",
            "\u00a0",
            "\u3000",
            "\r\n",
            ".",
            "|",
            ">",
            "<",
            "<|",
            "|>",
            "im_end",
            "]",
        ),
        *(
            "<|im_start|>",
            "<|im_end|>",
            "<|im_end|>\n\n",
            "<|end|>",
            "<tool_call>",
            "<mask>",
            "[MASK]",
            "[SEP]",
        ),
        *("<s>", "</s>", "<unk>", "<a>", "<b>", "<e>", "<l>", "<r>", "[UNK]", "</tool_call>"),
    ]
)
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)
MESSAGES = st.lists(TEXTS, min_size=1, max_size=8)


@settings(max_examples=60)
@given(turns=MESSAGES, branch=MESSAGES, max_bytes=st.sampled_from([MAX_REMEMBERED_BYTES, 3000, 0]))
def test_pieces_come_out_as_the_whole(
    backend: Tokenizer, turns: list[str], branch: list[str], max_bytes: int
) -> None:
    """Each turn of a growing conversation, and of a branch of it, has the tokens of its whole text, with any
    memory limit and any text around the special tokens."""
    encoder = PromptEncoder.of(backend, max_bytes)
    assert encoder is not None
    half = turns[: len(turns) // 2]
    for text in (*accumulate(turns), *accumulate([*half, *branch]), *accumulate(turns)):
        expected = backend.encode(text, add_special_tokens=False).ids
        tokens = encoder.encode(text)
        assert tokens == expected
        assert tokens.highest == max(expected, default=0)
        assert tokens.as_msgpack == msgspec.msgpack.encode(expected)
        assert encoder.statistics().num_bytes <= max_bytes


@pytest.mark.parametrize("num_tokens", [15, 16, 2**16 - 1, 2**16])
def test_a_prompt_of_any_length_is_written_as_msgpack_has_it(backend: Tokenizer, num_tokens: int) -> None:
    """The msgpack of a token list is right with each size of its length field."""
    encoder = PromptEncoder.of(backend)
    assert encoder is not None
    cut = cut_tokens(backend.get_added_tokens_decoder())[0]
    tokens = encoder.encode(cut * num_tokens)
    assert len(tokens) == num_tokens
    assert tokens.as_msgpack == msgspec.msgpack.encode(list(tokens))


def test_only_what_is_new_is_tokenized(backend: Tokenizer) -> None:
    """The next turn, and a branch from an earlier turn, tokenize only their new text."""
    encoder = PromptEncoder.of(backend)
    assert encoder is not None
    start, _ = CHAT_TOKENS
    cut = start if start in cut_tokens(backend.get_added_tokens_decoder()) else "<|end|>"
    turns = [f"{cut}user\n{number} {CORPUS[0]}" for number in range(50)]
    encoder.encode("".join(turns))
    before = encoder.statistics().num_tokenized_characters
    encoder.encode("".join([*turns, f"{cut}tool\nanswer"]))
    encoder.encode("".join([*turns[:20], f"{cut}user\nno, the other"]))
    added = encoder.statistics().num_tokenized_characters - before
    assert added <= len(f"{cut}tool\nanswer{cut}user\nno, the other")


def test_tokens_that_reach_over_others_are_not_cut_at() -> None:
    """A text is cut only at tokens that no neighbor can change."""
    assert cut_tokens(hostile().get_added_tokens_decoder()) == ["<|im_start|>", "<|end|>"]


def unlike_any(kind: str) -> Iterator[Tokenizer]:
    """Tokenizers whose texts may depend on more than a piece."""
    if kind == "chance":
        yield trained_bpe(special(*CHAT_TOKENS), dropout=0.5)
    if kind == "no special tokens":
        yield trained_bpe([])
    if kind == "tokens that overlap":
        yield trained_bpe(special(*CHAT_TOKENS, "|><|"))
    if kind == "python":
        tokenizer = trained_bpe(special(*CHAT_TOKENS))
        tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(_Joining())
        yield tokenizer


def _as_hf(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]


class _Joining:
    """A pre-tokenizer written in Python."""

    def pre_tokenize(self, text: object) -> None:
        """Leaves the text as it is."""


@pytest.mark.parametrize("kind", ["chance", "no special tokens", "tokens that overlap", "python"])
def test_where_pieces_may_differ_from_the_whole_there_are_none(kind: str) -> None:
    """A tokenizer with steps that may look beyond a piece tokenizes whole texts."""
    for tokenizer in unlike_any(kind):
        assert PromptEncoder.of(tokenizer) is None


def test_tokens_around_a_prompt_are_added_where_they_are_asked_for() -> None:
    """The model's own tokens before and after a text are placed as by the tokenizer, or left out."""
    tokenizer = EngineTokenizer(_as_hf(word_piece()))
    for text in ("<|im_start|>user said<|im_end|> so", "the user", ""):
        for add in (True, False):
            expected = tokenizer.hf.encode(text, add_special_tokens=add)
            assert tokenizer.encode(text, add_special_tokens=add) == expected
    assert tokenizer.encode("x") != tokenizer.encode("x", add_special_tokens=False)


def test_what_others_ask_of_the_tokenizer_changes_no_prompt(tokenizer: EngineTokenizer) -> None:
    """The user shares the tokenizer and may have called it with truncation; prompts stay the same."""
    text = "<|im_start|>user\nHello there, you<|im_end|>\n"
    expected = tokenizer.encode(text)
    tokenizer.hf(text, truncation=True, max_length=3)
    tokenizer.hf(text, split_special_tokens=True)
    assert tokenizer.encode(text) == expected
    assert json.dumps(expected)  # plain integers

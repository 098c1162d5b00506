"""Folders in Kimi-K2's published form have the tokens of tiktoken with the pattern of Kimi's code."""

from __future__ import annotations

import inspect
import json
import random
import textwrap
from pathlib import Path
from typing import Any

import pytest

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError
from engine.frontend.detokenizer import StreamTokenDecoder, TokenDecoder
from engine.records.sampling_params import SamplingParams
from engine.tokenization.tokenizer import Tokenizer
from tests.tokenization.tiktoken_folders import KIMI_PATTERN, added_tokens, train_ranks, write_tokenizer

VOCAB_SIZE = 1024
CHINESE = "今天天气很好，我们去公园散步。中文English混合，漢字とかな。" * 4
TEXTS = [
    "It's what they'll say: WE'VE seen McDonald's HTTPServer and naïve Ångström's cafés.",
    inspect.getsource(textwrap)[:6000],
    CHINESE,
    "北京市 Pascal汉字abc〇々",
    "🙂 👩‍👩‍👧‍👦 🇩🇪🏳️‍🌈 e\u0301 \u200d",
    "0 12 345 6789 1234567890 3.14159 1,000,000 ٣٤٥ ½ Ⅻ",
    "a  b   c\t\td \n\n  e\r\n\r\n    f \n g   ",
    " " * 90 + "x" + "\n" * 20 + "\t" * 9,
    "----====####____!!!\n\n// ... \\",
    "हिन्दी ไทย العربية עברית",
    "",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ranks trained on some of the texts, then named and reserved tokens."""
    folder = tmp_path_factory.mktemp("tiktoken")
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "vocab_size": VOCAB_SIZE}))
    write_tokenizer(folder, train_ranks(TEXTS, 900), VOCAB_SIZE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(ModelConfig(model=str(folder)))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """tiktoken's encoding, set up like Kimi's code."""
    tiktoken = pytest.importorskip("tiktoken", reason="the tiktoken library is not installed")
    load = pytest.importorskip("tiktoken.load")
    ranks = load.load_tiktoken_bpe(str(folder / "tiktoken.model"))
    named = {int(n): token["content"] for n, token in added_tokens(len(ranks), VOCAB_SIZE).items()}
    special = {named.get(n, f"<|reserved_token_{n}|>"): n for n in range(len(ranks), VOCAB_SIZE)}
    return tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens=special)


def test_tokens_are_those_of_tiktoken(tokenizer: Tokenizer, reference: Any) -> None:
    """Tokens are equal in English, code, Chinese, emoji, numbers and spaces, and decode to the text."""
    for text in [*TEXTS, "".join(TEXTS)]:
        tokens = tokenizer.encode(text)
        assert tokens == reference.encode(text, allowed_special="all"), text
        assert tokenizer.decode(tokens) == reference.decode(tokens) == text


def test_tokens_of_random_texts_are_those_of_tiktoken(tokenizer: Tokenizer, reference: Any) -> None:
    """Random pieces of the texts, joined, have equal tokens."""
    rng, whole = random.Random(0), "".join(TEXTS)
    for _ in range(500):
        starts = [rng.randrange(len(whole)) for _ in range(20)]
        text = "".join(whole[start : start + rng.randrange(12)] for start in starts)
        assert tokenizer.encode(text) == reference.encode(text, allowed_special="all"), text


def test_added_and_reserved_tokens_are_found_in_texts(tokenizer: Tokenizer, reference: Any) -> None:
    """Each is found by its own id, up to the vocabulary's size, and next to text."""
    assert len(tokenizer.hf) == VOCAB_SIZE == reference.n_vocab
    for token, token_id in reference._special_tokens.items():
        text = f"a {token}\nb{token}{token}"
        tokens = tokenizer.encode(text)
        assert tokens.count(token_id) == 3
        assert tokens == reference.encode(text, allowed_special="all")
        assert tokenizer.decode(tokens) == text


def test_only_special_tokens_are_left_out_of_decoded_texts(tokenizer: Tokenizer) -> None:
    """Parsers read the marks of tool calls; like Kimi's code, decoding keeps reserved tokens."""
    text = f"[BOS]a<|tool_calls_section_begin|>b<|reserved_token_{VOCAB_SIZE - 3}|>c<|im_end|>"
    left = tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True)
    assert left == f"a<|tool_calls_section_begin|>b<|reserved_token_{VOCAB_SIZE - 3}|>c"
    assert tokenizer.eos_token_id == tokenizer.special_tokens["[EOS]"]


@pytest.mark.parametrize("decoder", [TokenDecoder, StreamTokenDecoder])
def test_a_stream_has_whole_characters(tokenizer: Tokenizer, decoder: type[TokenDecoder]) -> None:
    """A character of several tokens is streamed with the last of them."""
    text = "".join(TEXTS)
    prompt, *tokens = tokenizer.encode("x" + "\N{PERSEVERING FACE}\N{HUGGING FACE}" + text)
    stream = decoder(tokenizer, SamplingParams(), [prompt])
    pieces = [stream.step(token) for token in tokens]
    assert "".join(pieces) == tokenizer.decode(tokens)
    assert "" in pieces
    assert not any("\ufffd" in piece for piece in pieces)


def test_nothing_that_makes_tokenizing_quick_is_lost(tokenizer: Tokenizer) -> None:
    """Prompts are cached in pieces and cut in parts; no token is added around a prompt."""
    assert tokenizer._encoder is not None
    assert tokenizer._token_reach is not None
    assert tokenizer.encode("a") == tokenizer.encode("a", add_special_tokens=False)
    long = "".join(TEXTS) * 40
    assert tokenizer.encode(long) == tokenizer.hf.encode(long)


def test_tools_have_their_keys_in_order(tokenizer: Tokenizer) -> None:
    """The keys of tools are sorted, as Kimi's code passes them to the template."""
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"required": [], "a": [{"z": 1, "b": 2}]}},
    }
    text = tokenizer.chat_text([{"role": "user", "content": "Hi"}], [tool])
    assert json.dumps([tool], sort_keys=True) in text
    assert text.endswith("Hi<|im_end|><|im_assistant|>assistant<|im_middle|>")


def damaged(folder: Path, to: Path, name: str, content: str | None) -> ModelConfig:
    """A copy of the folder with other content in a file, or without that file."""
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    if content is None:
        (to / name).unlink()
    else:
        (to / name).write_text(content)
    return ModelConfig(model=str(to))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", '{"model_type": "other"}', r"tiktoken\.model does not say .* kimi_k2, not for"),
        ("config.json", None, r"needs the file .*config\.json"),
        ("config.json", '{"model_type": "kimi_k2", "vocab_size": 300}', r"config\.json, vocab_size is less"),
        ("tokenizer_config.json", None, r"needs the file .*tokenizer_config\.json"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json, it is not a JSON object"),
        ("tokenizer_config.json", "{}", r"added_tokens_decoder is not an object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"7": {"content": "x"}}}',
            "has ids that are not",
        ),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"1000": {"content": "a"}}}', "one of the vocab"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {}, "bos_token": "[B]"}',
            "bos_token is '\\[B\\]'",
        ),
        ("tiktoken.model", "YQ== 0\nno\n", r"tiktoken\.model, line 2 is not a token"),
        ("tiktoken.model", "YQ== 1\n", "do not count up from 0"),
        ("tiktoken.model", "YQ== 0\n", "not every byte"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_files_name(
    folder: Path, tmp_path: Path, name: str, content: str | None, said: str
) -> None:
    """What cannot be read is refused in one sentence with the file's name."""
    with pytest.raises(ModelLoadError, match=said) as refused:
        Tokenizer.load(damaged(folder, tmp_path, name, content))
    assert "\n" not in str(refused.value)


def test_a_tokenizer_json_goes_first(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """tokenizer.json is preferred, whatever the model type."""
    assert tokenizer.backend is not None
    config = damaged(folder, tmp_path, "config.json", '{"model_type": "other"}')
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(config).encode(CHINESE) == tokenizer.encode(CHINESE)

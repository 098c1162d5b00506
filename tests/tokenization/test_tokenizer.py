"""Text and conversations to tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from engine.config.engine_config import ModelConfig
from engine.errors import ModelLoadError, RequestError
from engine.tokenization.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}


def test_a_chat_is_rendered_as_transformers_renders_it(tokenizer: Tokenizer) -> None:
    """Template and tokens are transformers', with and without tools."""
    choices: list[list[Any] | None] = [None, [WEATHER]]
    for tools in choices:
        expected = tokenizer.hf.apply_chat_template(
            HELLO, tools=tools, add_generation_prompt=True, return_dict=False
        )
        assert tokenizer.render_chat(HELLO, tools) == expected


def test_tools_and_template_arguments_reach_the_template(tokenizer: Tokenizer) -> None:
    """``tools``, a request's own template and its arguments are all used."""
    assert "weather" in tokenizer.decode(tokenizer.render_chat(HELLO, [WEATHER]))
    rendered = tokenizer.render_chat(
        HELLO, chat_template="{{ mood }}: {{ messages[0].content }}", chat_template_kwargs={"mood": "glad"}
    )
    assert tokenizer.decode(rendered) == "glad: Hello"


def test_the_arguments_of_tool_calls_reach_the_template_as_objects(tokenizer: Tokenizer) -> None:
    """Clients send JSON text, templates expect objects. Arguments that are not JSON stay text."""
    template = "{% for c in messages[0].tool_calls %}{{ c.function.arguments is mapping }} {% endfor %}"
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', "{broken", "")]
    rendered = tokenizer.render_chat(
        [{"role": "assistant", "content": None, "tool_calls": calls}], chat_template=template
    )
    assert tokenizer.decode(rendered) == "True False True "


def test_bytes_that_are_tokens_are_given_as_such(tokenizer: Tokenizer) -> None:
    """A vocabulary of bytes names them specially: <0xE9>, or a letter for each."""
    pieces = ["a", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = BackendTokenizer(
        models.BPE({piece: n for n, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    in_names = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))  # type: ignore[no-untyped-call]
    for each in (in_names, tokenizer):
        for text in ("aé", "a😀", "a\ufffd"):
            tokens = each.encode(text, add_special_tokens=False)
            assert b"".join(map(each.token_bytes, tokens)) == text.encode()


def test_text_parts_are_joined_and_others_refused(tokenizer: Tokenizer) -> None:
    """Content may come in parts; a part that is not text is an error that names its type."""
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert tokenizer.render_chat([{"role": "user", "content": parts}]) == tokenizer.render_chat(
        [{"role": "user", "content": "one\ntwo"}]
    )
    with pytest.raises(RequestError, match="image_url"):
        tokenizer.render_chat([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"messages": []}, "must not be empty"),
        ({"messages": HELLO, "chat_template": "{{ raise_exception('no such role') }}"}, "no such role"),
        ({"messages": HELLO, "chat_template": "{% broken"}, "template failed"),
        ({"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, "'tokenize'"),
    ],
)
def test_what_cannot_be_rendered_is_a_request_error(
    tokenizer: Tokenizer, arguments: dict[str, Any], said: str
) -> None:
    """A template is a program of the model's author: whatever it raises becomes one sentence."""
    with pytest.raises(RequestError, match=said):
        tokenizer.render_chat(**arguments)


def test_a_model_without_a_template_says_so(model_folder: Path) -> None:
    """Without a template a conversation is refused, not guessed."""
    bare = Tokenizer.load(ModelConfig(model=str(model_folder)))
    bare.hf.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        bare.render_chat(HELLO)


def test_a_folder_without_a_tokenizer_is_a_load_error(tmp_path: Path) -> None:
    """A folder without a tokenizer is refused in one sentence that names the folder."""
    with pytest.raises(ModelLoadError, match=r"tmp.* has no tokenizer"):
        Tokenizer.load(ModelConfig(model=str(tmp_path)))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A mistyped path is named as a path, not as a wrong hub name."""
    missing = tmp_path / "missing"
    with pytest.raises(ModelLoadError, match=rf"^The folder {missing} does not exist\.$"):
        Tokenizer.load(ModelConfig(model=str(missing)))


def test_a_long_text_is_encoded_quietly(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    """The request checks the length; the library's warning about it is suppressed."""
    logger = logging.getLogger("transformers")
    tokenizer.hf.deprecation_warnings.clear()  # it warns once per process
    logger.addHandler(caplog.handler)
    try:
        assert len(tokenizer.encode("long " * 5000)) > tokenizer.hf.model_max_length
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records


def test_bad_words_are_spelt_at_the_start_and_after_a_space(tokenizer: Tokenizer) -> None:
    """The forbidden spellings are the word at the start of a text and after a space."""
    spelt = {tokenizer.decode(ids) for ids in tokenizer.bad_word_token_ids(["self"])}
    assert spelt == {"self", " self"}

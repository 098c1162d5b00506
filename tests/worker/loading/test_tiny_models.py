"""Generated model folders are real: transformers reads them, every token decodes, chats with tools render."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from engine.worker.loading.tiny_models import MIN_VOCAB_SIZE, SPECIAL_TOKENS, TOOL_TOKENS, make_model_folder
from tests.worker.conftest import ModelFolders

CODE = "def f(x):\n    return x + 1  # naïve ☃\n"
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "ls", "description": "List.", "parameters": {}}}
]


def render(folder: Path, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert isinstance(text, str)
    return text


def test_every_id_decodes_and_text_survives(model_folders: ModelFolders) -> None:
    """The vocabulary has its full size, and any text is restored from its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_folders("qwen3"))
    assert len(tokenizer) == 512
    assert all(tokenizer.decode([token_id]) for token_id in range(512))
    assert tokenizer.decode(tokenizer(CODE).input_ids) == CODE
    for text in SPECIAL_TOKENS + TOOL_TOKENS:
        assert len(tokenizer(text).input_ids) == 1


def test_tool_tags_are_text_and_special_tokens_are_not(model_folders: ModelFolders) -> None:
    """Skipping special tokens hides the chat's frame but leaves tool calls for a parser to read."""
    tokenizer = AutoTokenizer.from_pretrained(model_folders("qwen3"))
    ids = tokenizer("<tool_call>\n{}\n</tool_call><|im_end|>").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>\n{}\n</tool_call>"


def test_a_chat_with_tools_renders_in_the_hermes_way(model_folders: ModelFolders) -> None:
    """Tools are in the system turn, calls in tags, and neighboring tool results share one user turn."""
    call = {"type": "function", "function": {"name": "ls", "arguments": {"path": "/"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "a"},
        {"role": "tool", "content": "b"},
    ]
    text = render(model_folders("qwen3"), messages, tools=TOOLS, add_generation_prompt=True)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert '<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call><|im_end|>' in text
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_chat_grows_at_its_end_only(model_folders: ModelFolders) -> None:
    """A longer history begins with the shorter one's text, so that its KV can be reused."""
    folder = model_folders("qwen3")
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes?"}]
    longer = [*messages, {"role": "tool", "content": "1"}, {"role": "user", "content": "Go."}]
    assert render(folder, longer).startswith(render(folder, messages))


def test_equal_arguments_give_equal_folders(model_folders: ModelFolders, tmp_path: Path) -> None:
    """Weights, tokenizer and config depend only on the arguments."""
    again = make_model_folder(tmp_path, "qwen3", head_dim=24, shards=2)
    for file in model_folders("qwen3").iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    """An unknown family or a vocabulary below the byte alphabet is refused."""
    with pytest.raises(ValueError, match=r"family must be one of llama, .* got 'sphinx'"):
        make_model_folder(tmp_path, "sphinx")
    with pytest.raises(ValueError, match=f"at least {MIN_VOCAB_SIZE}, got 100"):
        make_model_folder(tmp_path, vocab_size=100)

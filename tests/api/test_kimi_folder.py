"""Serves a folder in the published form of Kimi-K2: no tokenizer.json, and none of its code is run."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.config.engine_config import ModelConfig
from engine.tokenization.tokenizer import Tokenizer
from engine.worker.loading.tiny_models import make_model_folder
from tests.api.server import running_server
from tests.tokenization.tiktoken_folders import as_kimi, train_ranks
from tests.worker.conftest import VARIANTS

pytestmark = pytest.mark.slow
VOCAB_SIZE = 1024
SAID = "你好，世界！ Let's see 123456 🙂👩‍👧\n\n    done."
HELLO: Any = [{"role": "user", "content": "你好 🙂 what's up?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "北京"}<|tool_call_end|><|tool_calls_section_end|>'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "kimi"
    made = make_model_folder(path, **VARIANTS["deepseek-v3"], vocab_size=VOCAB_SIZE)
    return as_kimi(made, train_ranks([inspect.getsource(textwrap), SAID], 768))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    flags = ("--num-gpu-blocks-override", "400", "--tool-call-parser", "kimi_k2")
    with (
        running_server(folder, *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client,
    ):
        yield client
        assert server.interrupt() == 0


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(ModelConfig(model=str(folder)))


def replay(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    """The request fields that force this text as the answer."""
    tokens = tokenizer.encode(text)
    return {"max_tokens": len(tokens), "extra_body": {"replay_token_ids": tokens}}


def test_a_chat_is_answered_whole_and_as_a_stream(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """The model's own chat template is used; characters of several tokens are streamed whole."""
    fields = {"model": "tiny", "messages": HELLO, **replay(tokenizer, SAID)}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content == SAID
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(tokenizer.render_chat(HELLO))
    chunks = client.chat.completions.create(**fields, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == SAID
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_tool_call_is_read(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    """A call is read, since decoding keeps its added tokens."""
    fields = {"model": "tiny", "messages": HELLO, "tools": [TOOL], **replay(tokenizer, CALL)}
    message = client.chat.completions.create(**fields).choices[0].message
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "北京"})


def test_an_answer_follows_a_schema(client: openai.OpenAI) -> None:
    """The grammar reads token bytes from the same tokenizer."""
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["北京", "Köln"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("北京", "Köln")

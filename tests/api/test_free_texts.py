"""Promises of custom tools' grammars in formats that write text unquoted. On a real server, a random model is
made to begin a call without being required to, and follows the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.server import Server, running_server
from tests.tool_parsers.test_free_texts import TOKENS
from tests.tool_parsers.token_folders import folder_with_tokens

BEGINS = {
    "qwen3_coder": ("<tool_call>",),
    "seed_oss": ("<seed:tool_call>",),
    "glm45": ("<tool_call>",),
    "minimax_m2": ("<minimax:tool_call>",),
    "deepseek_v32": ("<", "｜DSML｜"),
    "step3": ("<｜tool_calls_begin｜>",),
}
"""Tokens that begin a call, by parser."""
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: ("add" | "remove") " " /[0-9]{2}/'}
FOLLOWS = re.compile("(add|remove) [0-9]{2}")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a response."""

    parser: str
    url: str
    body: dict[str, Any]

    def answer(self, **fields: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/responses", json={**self.body, **fields}, timeout=60)

    def stream(self) -> list[dict[str, Any]]:
        """Returns the events of the stream."""
        body = {**self.body, "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/responses", json=body, timeout=60) as lines:
            return [json.loads(line[6:]) for line in lines.iter_lines() if line.startswith("data: {")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has the formats' tags as tokens."""
    return folder_with_tokens(tmp_path_factory.mktemp("models"), TOKENS)


@pytest.fixture(scope="module", params=BEGINS)
def asked(request: pytest.FixtureRequest, folder: Path) -> Iterator[Asked]:
    """A request to a server with this tool parser; its reply begins a call."""
    flags = ("--num-gpu-blocks-override", "400", "--tool-call-parser", request.param)
    with running_server(folder, *flags) as server:
        yield Asked(request.param, server.url, begun(server, BEGINS[request.param]))


def begun(server: Server, texts: Sequence[str]) -> dict[str, Any]:
    """A request whose reply begins with these tokens in reverse order: each is preferred to the one
    before."""
    biases = {}
    for bias, text in enumerate(texts, 90):
        asked = {"prompt": text, "add_special_tokens": False}
        [token_id] = httpx.post(f"{server.url}/tokenize", json=asked, timeout=60).json()["tokens"]
        biases[str(token_id)] = bias
    return {
        "input": "hello",
        "tools": [{"type": "custom", "name": "patch", "format": PATCH}],
        "logit_bias": biases,
        "parallel_tool_calls": False,
        "max_output_tokens": 150,
    }


def custom_input(output: list[dict[str, Any]]) -> str:
    """The input of the response's only custom tool call."""
    [text] = [item["input"] for item in output if item["type"] == "custom_tool_call"]
    assert isinstance(text, str)
    return text


@pytest.mark.slow
def test_a_custom_tools_text_follows_its_grammar_where_the_model_may_choose(asked: Asked) -> None:
    """A custom tool's text follows its grammar when the tool choice is free, whole and streamed."""
    answer = asked.answer().json()
    assert "warnings" not in answer, answer
    assert FOLLOWS.fullmatch(custom_input(answer["output"]))
    told = asked.stream()
    deltas = [each["delta"] for each in told if each["type"] == "response.custom_tool_call_input.delta"]
    assert FOLLOWS.fullmatch("".join(deltas))
    assert custom_input(told[-1]["response"]["output"]) == "".join(deltas)


@pytest.mark.slow
def test_an_expression_is_kept_as_well(asked: Asked) -> None:
    """A regular expression is enforced as well, without a note in the receipt."""
    dated = {"type": "grammar", "syntax": "regex", "definition": "^(a/b|c\\/d):[0-9]{2}$"}
    answer = asked.answer(tools=[{"type": "custom", "name": "patch", "format": dated}]).json()
    assert re.fullmatch("(a/b|c/d):[0-9]{2}", custom_input(answer["output"]))
    assert "left_out" not in answer["usage"]["receipt"]


@pytest.mark.slow
def test_a_text_that_would_never_end_is_not_enforced_and_told(asked: Asked) -> None:
    """The last piece of this grammar also matches the end of the call. Unless a token ends the call, the
    receipt says that the grammar is not enforced."""
    endless = {"type": "custom", "name": "patch", "format": {**PATCH, "definition": r"start: /[\s\S]+/"}}
    answer = asked.answer(tools=[endless], max_output_tokens=5).json()
    told = answer["usage"]["receipt"].get("left_out", [])
    ends_by_token = asked.parser == "glm45"
    assert [note.partition(":")[0] for note in told] == ([] if ends_by_token else ["tools[0].format"])


@pytest.mark.slow
def test_a_grammar_that_is_none_is_refused_by_its_field(asked: Asked) -> None:
    wrong = {"type": "custom", "name": "patch", "format": {**PATCH, "definition": "start: nothing"}}
    refused = asked.answer(tools=[wrong])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools[0].format")

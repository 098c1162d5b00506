"""Promise: a field that would change the result is applied or refused by name, in every API; one that changes
nothing is accepted."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

Body = dict[str, Any]

HELLO = [{"role": "user", "content": "hello"}]
BASES: dict[str, Body] = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 1},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
}
EVERYWHERE: list[Body] = [
    {"audio": {"voice": "alloy", "format": "wav"}},
    {"modalities": ["text", "audio"]},
    {"web_search_options": {}},
    {"mirostat": 2},
    {"dry_multiplier": 0.8},
    {"typical_p": 0.9},
    {"max_new_tokens": 5},
    {"n_predict": 5},
    {"repeat_penalty": 1.2},
    {"plugins": [{"id": "web"}]},
    {"thinking_budget": 100},
    {"prompt_embeds": "gASVAAAA"},
    {"logits_processors": ["module.Processor"]},
    {"custom_logit_processor": "gASVAAAA"},
]
OF_ONE: list[tuple[str, Body]] = [
    ("/v1/chat/completions", {"function_call": {"name": "f"}}),
    ("/v1/chat/completions", {"add_special_tokens": True}),
    ("/v1/chat/completions", {"reasoning_effort": "a bit"}),
    ("/v1/responses", {"reasoning": {"effort": "a bit"}}),
    ("/v1/messages", {"response_format": {"type": "json_object"}}),
    ("/v1/messages", {"stop": ["x"]}),
    ("/v1/messages", {"n": 2}),
    ("/v1/messages", {"logit_bias": {"5": 1}}),
]
HARMLESS: Body = {
    "modalities": ["text"],
    "typical_p": 1,
    "mirostat": 0,
    "best_of": 1,
    "n_predict": None,
    "provider": {"order": ["x"]},
    "prediction": None,
    "service_tier": "auto",
    "safety_identifier": "me",
}


@pytest.mark.parametrize(
    ("path", "fields"), [*((path, fields) for path in BASES for fields in EVERYWHERE), *OF_ONE], ids=str
)
def test_what_would_change_the_result_is_refused(http: httpx.Client, path: str, fields: Body) -> None:
    """The error names the field."""
    answer = http.post(path, json=BASES[path] | fields)
    assert answer.status_code == 400, answer.text
    [name] = fields
    assert answer.json()["error"]["message"].startswith(name)


def test_what_stands_in_the_place_of_a_required_field_is_named(http: httpx.Client) -> None:
    """The error names the unsupported replacement, not the required field that is missing because of it."""
    answer = http.post("/v1/completions", json={"prompt_embeds": "gASVAAAA", "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_embeds"
    assert "a prompt is a text, token ids" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BASES)
def test_what_changes_nothing_is_taken(http: httpx.Client, path: str) -> None:
    """Clients send all their fields with neutral values; these are accepted."""
    answer = http.post(path, json=BASES[path] | HARMLESS)
    assert answer.status_code == 200, answer.text


SWITCH = "{{ 'off' if enable_thinking is defined and not enable_thinking else 'on' }} {{ reasoning_effort }}"
THOUGHTS: list[tuple[Body, str]] = [
    ({}, "on "),
    ({"reasoning_effort": "none"}, "off low"),
    ({"reasoning_effort": "minimal"}, "on low"),
    ({"reasoning_effort": "xhigh"}, "on high"),
    ({"reasoning": {"effort": "medium"}}, "on medium"),
    ({"reasoning": {"enabled": False}}, "off "),
    ({"thinking": {"type": "disabled"}}, "off "),
    ({"thinking": {"type": "enabled"}}, "on "),
    ({"enable_thinking": False}, "off "),
    ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, "on "),
]


@pytest.mark.parametrize(("fields", "prompt"), THOUGHTS, ids=str)
def test_how_hard_to_think_reaches_the_template(http: httpx.Client, fields: Body, prompt: str) -> None:
    """The reasoning effort reaches the template under every name that clients use."""
    body = BASES["/v1/chat/completions"] | {"chat_template": SWITCH, "return_token_ids": True} | fields
    tokens = http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"]
    assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == prompt


def tool(name: str) -> Body:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def allowed(mode: str, *names: str) -> Body:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools_leave_out_the_others(http: httpx.Client) -> None:
    """The model sees only the allowed tools, and calls one of them if a call is required."""
    body: Body = {"messages": HELLO, "tools": [tool("first"), tool("second")], "max_tokens": 60}
    answer = http.post("/v1/chat/completions", json=body | {"tool_choice": allowed("required", "second")})
    calls = answer.json()["choices"][0]["message"]["tool_calls"]
    assert {call["function"]["name"] for call in calls} == {"second"}
    free = http.post("/v1/chat/completions", json=body | {"tool_choice": allowed("auto", "first")})
    one = http.post("/v1/chat/completions", json=body | {"tools": [tool("first")]})
    assert free.json()["usage"]["prompt_tokens"] == one.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        (allowed("auto", "third"), "tool_choice.allowed_tools.tools[0].function.name"),
        (allowed("always", "first"), "tool_choice.allowed_tools.mode"),
        (allowed("required"), "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools.tools"),
    ],
)
def test_allowed_tools_are_checked(http: httpx.Client, choice: Body, field: str) -> None:
    """The error says what is wrong with them."""
    body = {"messages": HELLO, "tools": [tool("first")], "tool_choice": choice}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == field


def test_several_answers_without_chance_are_equal(http: httpx.Client) -> None:
    """``n`` is accepted at temperature 0 too; the answers are equal."""
    body = {"messages": HELLO, "n": 2, "temperature": 0, "max_tokens": 4}
    one, two = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert one["message"] == two["message"]


CALL = '<tool_call>\n{"name": "first", "arguments": {}}\n</tool_call>'
OFFERED: dict[str, Body] = {
    "/v1/chat/completions": {"tools": [tool("first")], "tool_choice": "none"},
    "/v1/responses": {"tools": [{"type": "function", "name": "first"}], "tool_choice": "none"},
    "/v1/messages": {
        "tools": [{"name": "first", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "none"},
    },
}


def said_in(path: str, answer: Body) -> tuple[str, bool]:
    """The text of an answer, and whether it calls a tool."""
    if path == "/v1/messages":
        blocks = answer["content"]
        return "".join(block.get("text", "") for block in blocks), "tool_use" in [b["type"] for b in blocks]
    if path == "/v1/responses":
        items = answer["output"]
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        return "".join(texts), "function_call" in [item["type"] for item in items]
    message = answer["choices"][0]["message"]
    return message["content"] or "", bool(message.get("tool_calls"))


@pytest.mark.parametrize("path", OFFERED)
def test_no_tool_is_called_where_none_may_be(http: httpx.Client, path: str) -> None:
    """The model is kept from writing a call; if it writes one all the same, it is text."""
    encoded = http.post("/tokenize", json={"prompt": "<tool_call>", "add_special_tokens": False}).json()
    [token] = encoded["tokens"]
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = BASES[path] | OFFERED[path] | {name: 6, "temperature": 0}
    if path != "/v1/messages":  # It has no biases.
        eager = {name: 6, "temperature": 0, "logit_bias": {str(token): 100}, "skip_special_tokens": False}
        assert "<tool_call>" in said_in(path, http.post(path, json=BASES[path] | eager).json())[0]
        assert "<tool_call>" not in said_in(path, http.post(path, json=body | eager).json())[0]
    encoded = http.post("/tokenize", json={"prompt": CALL, "add_special_tokens": False}).json()
    body = body | {"replay_token_ids": encoded["tokens"], name: len(encoded["tokens"])}
    assert said_in(path, http.post(path, json=body).json()) == (CALL, False)

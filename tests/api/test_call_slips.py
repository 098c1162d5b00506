"""Promises about malformed tool calls in every API: one reader of arguments; an incomplete call is never
run."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

HELLO = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
Body = dict[str, Any]
BODIES: dict[str, Body] = {
    "/v1/chat/completions": {
        "messages": HELLO,
        "tools": [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}],
    },
    "/v1/responses": {
        "input": "Hello",
        "tools": [{"type": "function", "name": "bash", "parameters": SCHEMA}],
    },
    "/v1/messages": {
        "messages": HELLO,
        "max_tokens": 500,
        "tools": [{"name": "bash", "input_schema": SCHEMA}],
    },
}
each_dialect = pytest.mark.parametrize("path", BODIES)


def said(http: httpx.Client, path: str, reply: str, **fields: object) -> Body:
    """The response of a model that generates ``reply``."""
    asked = {"prompt": reply + "<|im_end|>", "add_special_tokens": False}
    ids = http.post("/tokenize", json=asked).json()["tokens"]
    answer = http.post(path, json={**BODIES[path], "replay_token_ids": ids, **fields})
    assert answer.status_code == 200, answer.text
    body: Body = answer.json()
    return body


def streamed(http: httpx.Client, path: str, reply: str) -> list[Body]:
    """The event data of the same response as a stream."""
    asked = {"prompt": reply + "<|im_end|>", "add_special_tokens": False}
    ids = http.post("/tokenize", json=asked).json()["tokens"]
    with http.stream("POST", path, json={**BODIES[path], "replay_token_ids": ids, "stream": True}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def call_in(path: str, answer: Body) -> str:
    """The arguments of the response's only call, as text."""
    if path == "/v1/chat/completions":
        [call] = answer["choices"][0]["message"]["tool_calls"]
        return str(call["function"]["arguments"])
    if path == "/v1/responses":
        [item] = answer["output"]
        return str(item["arguments"])
    [block] = answer["content"]
    return json.dumps(block["input"])


def ending(path: str, answer: Body) -> str:
    """The finish reason, in the words of the path's API."""
    if path == "/v1/chat/completions":
        return str(answer["choices"][0]["finish_reason"])
    return str(answer["status"] if path == "/v1/responses" else answer["stop_reason"])


@each_dialect
@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ('{"command": "a\nb\tc"}', {"command": "a\nb\tc"}),
        (r'{"command": "C:\d+\Users"}', {"command": r"C:\d+\Users"}),
        ('{"command": "x",}', {"command": "x"}),
        ('{"command": ls}', {"INVALID_JSON": '{"command": ls}'}),
    ],
    ids=["control characters", "escapes", "comma", "broken"],
)
def test_arguments_are_json_in_every_dialect(
    http: httpx.Client, path: str, arguments: str, value: object
) -> None:
    """Small slips are repaired; if the meaning is lost, the tool gets everything that was written."""
    reply = f'<tool_call>\n{{"name": "bash", "arguments": {arguments}}}\n</tool_call>'
    answer = said(http, path, reply)
    assert json.loads(call_in(path, answer)) == value
    assert ending(path, answer) in ("tool_calls", "completed", "tool_use")


@each_dialect
def test_what_was_no_json_comes_back_as_it_was_written(http: httpx.Client, path: str) -> None:
    """In every API, a broken call in the history is rendered as the model wrote it."""
    broken = '{"command": ls}'
    held = {"INVALID_JSON": broken}
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": json.dumps(held)}}
    item = {"type": "function_call", "call_id": "c", "name": "bash", "arguments": json.dumps(held)}
    block = {"type": "tool_use", "id": "c", "name": "bash", "input": held}
    history: dict[str, Body] = {
        "/v1/chat/completions": {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "no"},
            ]
        },
        "/v1/responses": {
            "input": [*HELLO, item, {"type": "function_call_output", "call_id": "c", "output": "no"}]
        },
        "/v1/messages": {
            "messages": [
                *HELLO,
                {"role": "assistant", "content": [block]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "no"}]},
            ]
        },
    }
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {**BODIES[path], **history[path], limit: 1, "return_token_ids": True}
    answer = http.post(path, json=body).json()
    if path == "/v1/responses":  # it has no field for the prompt's tokens
        assert answer["status"] == "incomplete", answer
        return
    rendered = http.post("/detokenize", json={"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert f'"arguments": {broken}' in rendered
    assert "INVALID_JSON" not in rendered


BROKEN_OFF = '<tool_call>\n{"name": "bash", "arguments": {"command": "rm -rf /tmp/x'


@each_dialect
def test_a_call_that_is_broken_off_is_none_to_run(http: httpx.Client, path: str) -> None:
    """If a model ends its turn inside a string, the answer ends as one cut off by length. It holds exactly
    the arguments that were generated."""
    answer = said(http, path, BROKEN_OFF)
    assert (
        ending(path, answer)
        == {
            "/v1/chat/completions": "length",
            "/v1/responses": "incomplete",
            "/v1/messages": "max_tokens",
        }[path]
    )
    if path == "/v1/messages":
        assert json.loads(call_in(path, answer)) == {"INVALID_JSON": '{"command": "rm -rf /tmp/x'}
    else:
        assert call_in(path, answer) == '{"command": "rm -rf /tmp/x'


@each_dialect
def test_a_stream_of_it_ends_the_same_way(http: httpx.Client, path: str) -> None:
    """The streamed arguments do not form valid JSON, so that no client runs them."""
    events = streamed(http, path, BROKEN_OFF)
    if path == "/v1/chat/completions":
        deltas = [choice["delta"] for event in events for choice in event["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert "".join(call["function"]["arguments"] for call in calls) == '{"command": "rm -rf /tmp/x'
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    elif path == "/v1/responses":
        assert events[-1]["type"] == "response.incomplete"
        assert events[-1]["response"]["output"][0]["status"] == "incomplete"
    else:
        [delta] = [event["delta"] for event in events if event["type"] == "message_delta"]
        assert delta["stop_reason"] == "max_tokens"
        pieces = [e["delta"]["partial_json"] for e in events if e["type"] == "content_block_delta"]
        assert "".join(pieces) == '{"command": "rm -rf /tmp/x'


@each_dialect
@pytest.mark.parametrize("key", ["args", "input", "kwargs", None])
def test_arguments_under_another_name_are_never_lost(http: httpx.Client, path: str, key: str | None) -> None:
    """Arguments are kept, whichever key they are written under."""
    members = '"command": "ls"'
    inside = members if key is None else f'"{key}": {{{members}}}'
    answer = said(http, path, f'<tool_call>\n{{"name": "bash", {inside}}}\n</tool_call>')
    assert json.loads(call_in(path, answer)) == {"command": "ls"}


@each_dialect
def test_the_head_of_a_call_that_was_cut_off_is_no_text(http: httpx.Client, path: str) -> None:
    """A reply cut off before the name of the called tool shows none of the markup."""
    reply = 'Sure. <tool_call>\n{"na'
    ids = http.post("/tokenize", json={"prompt": reply, "add_special_tokens": False}).json()["tokens"]
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    fields = {"replay_token_ids": ids, limit: len(ids)}
    answer = http.post(path, json={**BODIES[path], **fields}).json()
    assert "Sure." in json.dumps(answer)
    assert "<tool_call>" not in json.dumps(answer)
    assert ending(path, answer) in ("length", "incomplete", "max_tokens")

"""Promises of reply parsers, checked on a real server: reasoning and calls are separate, streamed or not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.server import Server, running_server

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "edit",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
            },
        },
    }
]
CODER_CALL = (
    "<tool_call>\n<function=edit>\n<parameter=path>\n/tmp/é.py\n</parameter>\n"
    "<parameter=line>\n7\n</parameter>\n</function>\n</tool_call>"
)
HERMES_CALL = '<tool_call>\n{"name": "edit", "arguments": {"path": "/tmp/é.py", "line": 7}}\n</tool_call>'


@pytest.fixture(scope="module")
def coder(model: Path) -> Iterator[Server]:
    """A server whose model reasons, and calls tools in Qwen3-Coder's format."""
    flags = ("--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3")
    with running_server(model, "--num-gpu-blocks-override", "400", *flags) as running:
        yield running
        assert running.interrupt() == 0


def whole(server: Server, reply: str, **fields: Any) -> dict[str, Any]:
    """The parsed answer for this reply."""
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body(server, reply, **fields), timeout=60)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return {**summary(choice["message"]), "finish_reason": choice["finish_reason"]}


def streamed(server: Server, reply: str, **fields: Any) -> dict[str, Any]:
    """The same, assembled from a stream."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    finish_reason = None
    asked = {**body(server, reply, **fields), "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=asked, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            finish_reason = choice["finish_reason"] or finish_reason
            for key in ("content", "reasoning", "reasoning_content"):
                message[key] += choice["delta"].get(key) or ""
            for delta in choice["delta"].get("tool_calls", []):
                if delta["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
                for key, value in delta["function"].items():
                    message["tool_calls"][delta["index"]]["function"][key] += value
    return {**summary(message), "finish_reason": finish_reason}


def body(server: Server, reply: str, **fields: Any) -> dict[str, Any]:
    """A request whose reply is forced to this text, token by token."""
    asked = {"prompt": reply + "<|im_end|>", "add_special_tokens": False}
    tokens = httpx.post(f"{server.url}/tokenize", json=asked, timeout=60).json()["tokens"]
    return {"messages": HELLO, "tools": TOOLS, "replay_token_ids": tokens, **fields}


def summary(message: dict[str, Any]) -> dict[str, Any]:
    """Checks that both names of reasoning agree: clients know one or the other."""
    assert message.get("reasoning") == message.get("reasoning_content")
    return {
        "content": message.get("content") or "",
        "reasoning": message.get("reasoning") or "",
        "calls": [
            (call["function"]["name"], json.loads(call["function"]["arguments"]))
            for call in message.get("tool_calls") or []
        ],
    }


EDIT = ("edit", {"path": "/tmp/é.py", "line": 7})


@pytest.mark.parametrize(
    ("reply", "content", "reasoning", "calls"),
    [
        (f"<think>\nI must edit.\n</think>\n\nSure.\n\n{CODER_CALL}", "Sure.", "I must edit.", [EDIT]),
        (f"{CODER_CALL}\n{CODER_CALL}", "", "", [EDIT, EDIT]),
        ("<think>\nHm.\n</think>\n\nHello.", "Hello.", "Hm.", []),
        (f"<think>\nNever {CODER_CALL}!</think>", "", f"Never {CODER_CALL}!", []),
        ("<think>\nNow " + CODER_CALL[11:], "", "Now ", [EDIT]),
        (f"<think>\nOn we go.\n{CODER_CALL}", "", "On we go.", [EDIT]),
        ("a <think> about <tool_call> as such", "a <think> about <tool_call> as such", "", []),
    ],
)
def test_thoughts_and_calls_arrive_apart(
    coder: Server, reply: str, content: str, reasoning: str, calls: list[Any]
) -> None:
    """Reasoning is ``reasoning``, arguments have their schema's types, the rest is content; streamed too."""
    expected = {
        "content": content,
        "reasoning": reasoning,
        "calls": calls,
        "finish_reason": "tool_calls" if calls else "stop",
    }
    assert whole(coder, reply) == expected
    assert streamed(coder, reply) == expected


def test_strict_that_cannot_be_enforced_is_told(coder: Server) -> None:
    """A call format that is not JSON cannot enforce a schema; the receipt says so."""
    strict = {**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}  # type: ignore[dict-item]
    asked = {"messages": HELLO, "tools": [strict], "max_tokens": 2}
    answer = httpx.post(f"{coder.url}/v1/chat/completions", json=asked, timeout=60).json()
    [note] = answer["usage"]["receipt"]["left_out"]
    assert note.startswith("tools: strict (edit) is not enforced")


def test_a_stop_string_in_the_thoughts_ends_no_answer(coder: Server) -> None:
    """A stop string in the reasoning is ignored; in the content it ends the answer, streamed or not, in every
    API."""
    reply = "<think>\nI end with STOP.\n</think>\n\nthe answer STOP more"
    for read in (whole, streamed):
        said = read(coder, reply, stop=["STOP"])
        assert (said["reasoning"], said["content"]) == ("I end with STOP.", "the answer ")
        assert said["finish_reason"] == "stop"
    given = body(coder, reply)
    message = {"messages": HELLO, "max_tokens": 500, "stop_sequences": ["STOP"]}
    answer = httpx.post(
        f"{coder.url}/v1/messages",
        json={**message, "replay_token_ids": given["replay_token_ids"]},
        timeout=60,
    ).json()
    assert answer["content"][-1]["text"] == "the answer "
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")


def test_a_prompt_that_has_begun_the_thoughts(coder: Server) -> None:
    """A reply begins inside the reasoning if the prompt ends there, and outside if the prompt has closed
    it."""
    reply = "Let me see.\n</think>\n\nYes."
    inside = {"content": "Yes.", "reasoning": "Let me see.", "calls": [], "finish_reason": "stop"}
    going_on = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [*HELLO, {"role": "assistant", "content": "<think>\n"}]
    assert whole(coder, reply, messages=messages, **going_on) == inside
    assert streamed(coder, reply, messages=messages, **going_on) == inside
    closed = [*HELLO, {"role": "assistant", "content": "<think>\n\n</think>\n\n"}]
    outside = {"content": "No <think>.", "reasoning": "", "calls": [], "finish_reason": "stop"}
    assert whole(coder, "No <think>.", messages=closed, **going_on) == outside


def test_the_template_shows_how_calls_are_written(server: Server) -> None:
    """Without flags, a server reads only Hermes calls, as its model's template writes them."""
    expected = {"content": "Sure.", "reasoning": "", "calls": [EDIT], "finish_reason": "tool_calls"}
    assert whole(server, f"Sure.\n{HERMES_CALL}") == expected
    assert streamed(server, f"Sure.\n{HERMES_CALL}") == expected
    assert whole(server, CODER_CALL)["content"] == CODER_CALL


def test_an_answer_between_tags_and_calls_by_other_keys(model: Path) -> None:
    """Cohere's format is read, streamed and forced."""
    flags = ("--tool-call-parser", "cohere_command4", "--reasoning-parser", "cohere_command4")
    call = (
        '[\n    {"tool_call_id": "0", "tool_name": "edit", "parameters": {"path": "/tmp/é.py", "line": 7}}\n]'
    )
    thought = "<|START_THINKING|>I must edit.<|END_THINKING|>"
    with running_server(model, "--num-gpu-blocks-override", "400", *flags) as server:
        for read in (whole, streamed):
            acted = read(server, f"{thought}<|START_ACTION|>{call}<|END_ACTION|>")
            assert (acted["reasoning"], acted["content"], acted["calls"]) == ("I must edit.", "", [EDIT])
            said = read(server, f"{thought}<|START_TEXT|>Done.<|END_TEXT|>")
            assert (said["reasoning"], said["content"], said["calls"]) == ("I must edit.", "Done.", [])
        demand = {"messages": HELLO, "tools": [STRICT], "tool_choice": "required", **ONE_CALL}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=demand, timeout=60).json()
        [forced] = summary(answer["choices"][0]["message"])["calls"]
        assert (forced[0], set(forced[1])) == ("edit", {"path"})


MESSAGES = {
    "muse": (
        " to=self<|message|>I must edit.<|eom|><|start|>assistant to=commentary<|message|>Sure.<|eom|>"
        '<|start|>assistant to=edit<|message|><atem:function_calls><atem:invoke name="edit">'
        '<atem:parameter name="path">/tmp/é.py</atem:parameter><atem:parameter name="line">7'
        "</atem:parameter></atem:invoke></atem:function_calls><|eom|>"
    ),
    "inkling": (
        "<|content_thinking|>I must edit.<|end_message|><|message_model|><|content_text|>Sure.<|end_message|>"
        '<|message_model|><|content_invoke_tool_json|>{"name": "edit", "args": {"path": "/tmp/é.py", '
        '"line": 7}}<|end_message|>'
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_arrive_as_what_their_heads_say(model: Path, name: str) -> None:
    """Formats with message headers: reasoning, text and calls are read and streamed, and a call is forced."""
    flags = ("--tool-call-parser", name, "--reasoning-parser", name)
    with running_server(model, "--num-gpu-blocks-override", "400", *flags) as server:
        for read in (whole, streamed):
            acted = read(server, MESSAGES[name])
            assert (acted["reasoning"], acted["content"], acted["calls"]) == ("I must edit.", "Sure.", [EDIT])
        demand = {"messages": HELLO, "tools": [STRICT], "tool_choice": "required", **ONE_CALL}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=demand, timeout=60).json()
        [forced] = summary(answer["choices"][0]["message"])["calls"]
        assert (forced[0], set(forced[1])) == ("edit", {"path"})


def test_structural_tags_come_behind_the_thoughts(coder: Server) -> None:
    """After reasoning that the prompt has closed, the content follows the structural tags alone."""
    closed = [*HELLO, {"role": "assistant", "content": "<think>\n\n</think>\n\n"}]
    content = {"type": "regex", "pattern": "[0-9]{2}"}
    form = {"type": "tag", "begin": "<n>", "content": content, "end": "</n>"}
    asked = {
        "messages": closed,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "response_format": {"type": "structural_tag", "format": form},
        "max_tokens": 60,
    }
    answer = httpx.post(f"{coder.url}/v1/chat/completions", json=asked, timeout=60).json()
    said = summary(answer["choices"][0]["message"])
    assert said["reasoning"] == ""
    assert re.fullmatch("<n>[0-9]{2}</n>", said["content"])


ONE_CALL = {"parallel_tool_calls": False, "temperature": 0, "max_tokens": 200}
STRICT = {
    "type": "function",
    "function": {
        "name": "edit",
        "parameters": {
            "type": "object",
            "properties": {"path": {"enum": ["a.py", "b.py"]}},
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}

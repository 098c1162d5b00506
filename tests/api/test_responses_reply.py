"""Promises of how a reply becomes items and events, for every way to cut it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.api.openai_responses.custom_input import CustomInputReader, as_arguments
from engine.api.openai_responses.events import Event
from engine.api.openai_responses.input_items import MessageList, seal_reasoning
from engine.api.openai_responses.reply import Reply
from engine.api.openai_responses.tools import Tools
from engine.tool_parsers import ContentDelta, HermesToolParser, ReasoningDelta, ReplyDelta, ToolCallDelta

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "bash"},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]},
]
RESPONSE_ID = "resp_" + "0" * 32

texts = st.text(alphabet=st.sampled_from('ab\n\t "\\{}<>é😀\u2028/'), max_size=12)
names = st.sampled_from(["bash", "patch", "crm__find", "unknown"])


@st.composite
def calls(draw: st.DrawFn) -> str:
    """A call as models write it, valid or not."""
    name, text = draw(names), draw(texts)
    arguments = draw(st.sampled_from([{"input": text}, {"command": text}, {}]))
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=draw(st.booleans()))
    return draw(st.sampled_from([f"<tool_call>\n{call}\n</tool_call>", f"<tool_call>{call[:-9]}"]))


@dataclass(frozen=True)
class Script:
    """Reasoning, then a reply, and where both are cut."""

    thought: str
    reply: str
    cuts: list[int]

    def pieces(self, text: str) -> list[str]:
        at = sorted({0, len(text), *(cut % (len(text) + 1) for cut in self.cuts)})
        return [text[start:end] for start, end in pairwise(at)]


scripts = st.builds(
    Script,
    thought=texts,
    reply=st.lists(st.one_of(texts, calls()), max_size=4).map("\n".join),
    cuts=st.lists(st.integers(0, 400), max_size=30),
)


@dataclass
class ClientHint:
    """A client that trusts the events."""

    added: list[dict[str, Any]] = field(default_factory=list)
    parts: dict[tuple[int, int], str] = field(default_factory=dict)
    done: list[dict[str, Any]] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)

    def read(self, event: Event) -> None:
        told = msgspec.json.decode(msgspec.json.encode(event))
        match told["type"].split("."):
            case [_, "output_item", "added"]:
                assert told["output_index"] == len(self.added) == len(self.done)
                self.added.append(told["item"])
                self.texts[told["output_index"]] = ""
            case [_, "output_item", "done"]:
                assert told["output_index"] == len(self.done)
                assert (told["item"]["id"], told["item"]["type"]) == (
                    self.added[-1]["id"],
                    self.added[-1]["type"],
                )
                self.done.append(told["item"])
            case [_, _, "delta"]:
                assert told["delta"]
                assert told["item_id"] == self.added[told["output_index"]]["id"]
                self.texts[told["output_index"]] += told["delta"]
            case [_, ("output_text" | "reasoning_text"), "done"]:
                assert told["text"] == self.texts[told["output_index"]]
            case [_, "function_call_arguments", "done"]:
                assert told["arguments"] == self.texts[told["output_index"]]
            case [_, "custom_tool_call_input", "done"]:
                assert told["input"] == self.texts[told["output_index"]]


def read_reply(script: Script, *, cut: bool) -> tuple[list[dict[str, Any]], ClientHint]:
    """Returns the items, and the client that read the events."""
    tools = Tools()
    tools.add(TOOLS, "tools")
    reply, parser, told = Reply(RESPONSE_ID, tools, seals_reasoning=True), HermesToolParser(), ClientHint()
    steps: list[list[ReplyDelta]] = [
        [ReasoningDelta(piece)] for piece in (script.pieces(script.thought) if cut else [script.thought])
    ]
    steps += [parser.feed(piece) for piece in (script.pieces(script.reply) if cut else [script.reply])]
    steps.append(parser.finish())
    for deltas in steps:
        for event in reply.add([delta for delta in deltas if delta != ReasoningDelta("")], []):
            told.read(event)
    for event in reply.end("completed"):
        told.read(event)
    items: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(reply.items))
    return items, told


def without_call_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "call_id"} for item in items]


@given(scripts)
def test_events_and_items_are_one(script: Script) -> None:
    """What a client adds up from any stream is the response's output, including ids, and equals the items of
    the uncut reply."""
    items, told = read_reply(script, cut=True)
    assert told.done == items
    whole, _ = read_reply(script, cut=False)
    assert without_call_ids(items) == without_call_ids(whole)
    assert len({item["id"] for item in items}) == len(items)


@given(scripts)
def test_a_reply_that_is_sent_back_is_one_message(script: Script) -> None:
    """All items of a reply become one assistant message with its reasoning, text and calls."""
    items, _ = read_reply(script, cut=True)
    messages = MessageList(None)
    messages.extend(items, "input")
    [message] = messages.messages
    parser = HermesToolParser()
    deltas = parser.feed(script.reply) + parser.finish()
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    assert message["role"] == "assistant"
    assert message["content"] == content
    assert message.get("reasoning", "") == script.thought
    heads = [delta.name for delta in deltas if isinstance(delta, ToolCallDelta) and delta.name]
    assert [call["function"]["name"] for call in message.get("tool_calls", [])] == heads


@given(texts, st.lists(st.integers(0, 200), max_size=20), st.booleans())
def test_a_custom_tools_input_is_read_from_json(text: str, cuts: list[int], is_ascii: bool) -> None:
    """The client gets the text, however the model escapes it and wherever the stream is cut."""
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii)
    reader = CustomInputReader()
    pieces = [reader.feed(piece) for piece in Script("", "", cuts).pieces(arguments)]
    assert "".join(pieces) + reader.finish() == text
    assert json.loads(as_arguments(text)) == {"input": text}


def test_items_of_every_kind_are_understood() -> None:
    """Items of clients' histories: calls that a server ran are left out, those that the client ran are shown,
    and everything between two tool outputs is one message."""
    messages = MessageList("Be brief.")
    messages.extend(
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "No jokes."}]},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Yes?"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"type": "agent_message", "author": "a", "content": [{"type": "input_text", "text": "go"}]},
            {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            {"type": "reasoning", "summary": [], "encrypted_content": "somebody else's"},
            {"type": "reasoning", "summary": [], "encrypted_content": seal_reasoning("Hm.")},
            {"type": "local_shell_call", "call_id": "c1", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "shell_call", "call_id": "c2", "action": {"commands": ["ls"]}},
            {"type": "apply_patch_call", "call_id": "c3", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "local_shell_call_output", "id": "c1", "output": "a"},
            {"type": "shell_call_output", "call_id": "c2", "output": [{"stdout": "a"}]},
            {"type": "apply_patch_call_output", "call_id": "c3", "status": "completed"},
            {"type": "message", "role": "user", "content": "again"},
        ],
        "input",
    )

    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {
            "type": "function",
            "function": {"name": name, "arguments": arguments},
            "id": call_id,
        }

    assert messages.messages == [
        {"role": "system", "content": "Be brief.\n\nNo jokes."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "Hm.",
            "tool_calls": [
                call("c1", "local_shell", '{"type": "exec", "command": ["ls"]}'),
                call("c2", "shell", '{"commands": ["ls"]}'),
                call("c3", "apply_patch", '{"type": "delete_file", "path": "a"}'),
            ],
        },
        {"role": "tool", "content": "a", "tool_call_id": "c1"},
        {"role": "tool", "content": '[{"stdout": "a"}]', "tool_call_id": "c2"},
        {"role": "tool", "content": "completed", "tool_call_id": "c3"},
        {"role": "user", "content": "again"},
    ]


def test_arguments_of_another_shape() -> None:
    """If the arguments have another shape, the client gets their ``input`` if it is a text, else all of
    them."""
    for arguments, expected in [
        ('{"path": "a", "input": "x"}', "x"),
        ('"x"', "x"),
        ('{"path": "a"}', '{"path": "a"}'),
        ('{"input": 5}', '{"input": 5}'),
        ("not json", "not json"),
        ('{"input": "cut off \\u00', "cut off "),
        ('{"input": "half \\ud83d"}', "half \ufffd"),
        ('{"input": "half \\udc00 \\q \\u12x"}', "half \ufffd \\q \\u12x"),
        ("", ""),
    ]:
        reader = CustomInputReader()
        assert reader.feed(arguments) + reader.finish() == expected

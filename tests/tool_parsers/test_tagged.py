"""Promises of formats with their own tags, whole and in letters: reasoning around calls, models' errors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.tool_parsers import ParsedReply
from engine.tool_parsers.formats import ReplyFormat

NESTED = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "lines": {"type": "array", "items": {"type": "integer"}},
        "names": {"type": "array", "items": {"type": "string"}},
        "options": {"type": "object", "properties": {"deep": {"type": "boolean"}, "tag": {"type": "string"}}},
    },
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": NESTED}} for name in ("write", "stop")
]
NS = "]<]minimax[>["
Calls = list[tuple[str, dict[str, Any] | None]]


def read(name: str, reasoning: str, text: str, *, with_tools: bool = True) -> ParsedReply:
    """Reads the reply; asserts that it is the same whole and in single characters."""
    replies = []
    for pieces in ([text], list(text)):
        reply_format = ReplyFormat.choose(name, reasoning, None)
        parser, reply = reply_format.parser(TOOLS if with_tools else None, ""), ParsedReply()
        for piece in pieces:
            reply.add(parser.feed(piece))
        reply.add(parser.finish())
        replies.append(reply)
    whole, cut = replies
    assert (whole.content, whole.reasoning) == (cut.content, cut.reasoning)
    assert [(call.name, call.arguments) for call in whole.calls] == [
        (call.name, call.arguments) for call in cut.calls
    ]
    return whole


def arguments(text: str) -> dict[str, Any] | None:
    """The arguments; None if they are cut off."""
    try:
        value: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return value


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        (
            "minimax_m2",
            (
                '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a\n'
                '<parameter name="text">b</parameter>\n</invoke>\n</minimax:tool_call>'
            ),
            [("write", {"path": "a", "text": "b"})],
        ),
        (
            "minimax_m2",
            '<invoke name="write"><parameter name="path">a</parameter></invoke></minimax:tool_call>',
            [("write", {"path": "a"})],
        ),
        (
            "minimax_m2",
            (
                '<minimax:tool_call><invoke name="write"><parameter name="text">see </invoke> and '
                "more</parameter></invoke></minimax:tool_call>"
            ),
            [("write", {"text": "see </invoke> and more"})],
        ),
        (
            "minimax_m2",
            '<minimax:tool_call><invoke name="write">{"path": "a"}</invoke></minimax:tool_call>',
            [("write", {"path": "a"})],
        ),
        (
            "minimax_m2",
            (
                '<minimax:tool_call><invoke name="stop"></invoke><invoke name="write">'
                '<parameter name="lines">[1, 2]</parameter></invoke>'
            ),
            [("stop", {}), ("write", {"lines": [1, 2]})],
        ),
        (
            "step3",
            (
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="write">'
                '<steptml:parameter name="path">if a < b</steptml:parameter></steptml:invoke>'
                "<｜tool_call_end｜>"
            ),
            [("write", {"path": "if a < b"})],
        ),
        (
            "gemma4",
            '<|tool_call>call:write{"path":<|"|>a<|"|>, lines: [1, 2], options:{tag:<|"|>"x"<|"|>}}',
            [("write", {"path": "a", "lines": [1, 2], "options": {"tag": '"x"'}})],
        ),
        (
            "gemma4",
            '<|tool_call>{"name": "write", "arguments": {"path": "a"}}<tool_call|>',
            [("write", {"path": "a"})],
        ),
        (
            "gemma4",
            '<|tool_call>call:write{path:"a\\n",text:plain words,lines:[]}<tool_call|>',
            [("write", {"path": "a\n", "text": "plain words", "lines": []})],
        ),
        ("gemma4", '<|tool_call>call:write{path:<|"|>half', [("write", None)]),
        (
            "gemma4",
            '<|tool_call>call:write{path:<|"|>a<|"|> ? }<tool_call|>\n<|tool_call>call:stop{}<tool_call|>',
            [("write", {"path": "a", "INVALID_JSON": '{"path": "a" ? }'}), ("stop", {})],
        ),
        (
            "minimax_m3",
            (
                f'{NS}<tool_call>\n{NS}<invoke name="write">{NS}<path>1{NS}</path>{NS}<names>'
                f"{NS}<item>2{NS}</item>{NS}<item>b{NS}</item>{NS}</names>{NS}<lines>{NS}<item>3{NS}</item>{NS}</lines>{NS}<options>"
                f"{NS}<deep>true{NS}</deep>{NS}<tag>7{NS}</tag>{NS}</options>{NS}</invoke>\n{NS}</tool_call>"
            ),
            [
                (
                    "write",
                    {"path": "1", "names": ["2", "b"], "lines": [3], "options": {"deep": True, "tag": "7"}},
                )
            ],
        ),
        (
            "minimax_m3",
            (
                f'{NS}<tool_call>{NS}<invoke name="write">{NS}<path>a{NS}</invoke>{NS}<invoke name="stop">'
                f"{NS}</invoke>{NS}</tool_call>"
            ),
            [("write", {"path": "a"}), ("stop", {})],
        ),
        (
            "minimax_m3",
            (
                f'{NS}<tool_call>{NS}<invoke name="write">{NS}<lines>{NS}</lines>{NS}<options>{NS}</options>'
                f"{NS}</invoke>{NS}</tool_call>"
            ),
            [("write", {"lines": [], "options": {}})],
        ),
        (
            "kimi_k3",
            (
                '<|open|>call tool="write" index="1"<|sep|><|open|>argument key="path" type="string"<|sep|>1'
                '<|close|>argument<|sep|><|open|>argument key="lines" type="array"<|sep|>[1]'
                "<|close|>argument<|sep|><|close|>call<|sep|>"
            ),
            [("write", {"path": "1", "lines": [1]})],
        ),
        (
            "apertus",
            '<|tools_prefix|>[{"write": {"path": "a"}}, {"stop": {}}]<|tools_suffix|>',
            [("write", {"path": "a"}), ("stop", {})],
        ),
        (
            "granite",
            '<|tool_call|> [{"arguments": {"path": "a"}, "name": "write"}]',
            [("write", {"path": "a"})],
        ),
        (
            "hy_v3",
            "<tool_calls>\n<tool_call>write<tool_sep>\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n",
            [("write", None)],
        ),
        (
            "hy_v3",
            "<tool_call:opensource>stop</tool_call:opensource>",
            [("stop", {})],
        ),
        (
            "hy_v3",
            "<tool_calls>stop<tool_sep>\n</tool_calls>",
            [("stop", {})],
        ),
        (
            "hy_v3",
            "<tool_calls><tool_call>write<tool_sep>so</tool_calls> ",
            [("write", {"INVALID_JSON": "so"})],
        ),
        (
            "seed_oss",
            "<seed:tool_call>\n<function=write>\n<parameter=path>a\n</parameter>\n</function>\n</seed:tool_call>",
            [("write", {"path": "a\n"})],
        ),
    ],
)
def test_calls_are_read_as_they_were_meant(name: str, text: str, calls: Calls) -> None:
    reply = read(name, "none", f"Look:{text}")
    assert [(call.name, arguments(call.arguments)) for call in reply.calls] == calls
    assert reply.content.strip() == "Look:"


@pytest.mark.parametrize(
    ("name", "reasoning", "text"),
    [
        ("gemma4", "gemma4", "<|channel>thought\nHm.\n<channel|>Yes."),
        ("seed_oss", "seed_oss", "<seed:think>Hm.</seed:think>Yes."),
        ("apertus", "apertus", "<|inner_prefix|>Hm.<|inner_suffix|>Yes."),
        ("minimax_m2", "minimax_m2", "<think>\nHm.\n</think>\n\nYes."),
        ("minimax_m3", "minimax_m3", "<mm:think>Hm.</mm:think>Yes."),
        ("hy_v3", "hy_opensource", "<think:opensource>Hm.</think:opensource>Yes."),
        (
            "kimi_k3",
            "kimi_k3",
            "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>",
        ),
    ],
)
@pytest.mark.parametrize("with_tools", [True, False])
def test_reasoning_and_answers_are_told_apart(name: str, reasoning: str, text: str, with_tools: bool) -> None:
    reply = read(name, reasoning, text, with_tools=with_tools)
    assert (reply.reasoning, reply.content, reply.calls) == ("Hm.", "Yes.", [])


def test_text_that_only_looks_like_a_call_is_content() -> None:
    for name, text in (
        ("gemma4", "<|tool_call>call it a day"),
        ("granite-20b-fc", "the <function_call> tag"),
        ("hunyuan_a13b", "a list <tool_calls>[1, 2]</tool_calls>"),
        ("phi4_mini_json", "import functools[0]"),
        ("apertus", "<|tools_prefix|>[1]"),
        ("lfm2", "an [x] in a list"),
    ):
        reply = read(name, "none", text)
        assert (reply.calls, reply.content) == ([], text), name

"""Promises of formats that fewer people use: answers between special tags, calls in any envelope, and what
stays text; whole and one character at a time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tool_parsers import ParsedReply
from engine.tool_parsers.formats import ReplyFormat
from tests.tool_parsers.family import TOOLS

Call = tuple[str, dict[str, object]]
LS: Call = ("bash", {"command": "ls"})
NOW: Call = ("get.time", {})
COHERE_LS = '[{"tool_call_id": "0", "tool_name": "bash", "parameters": {"command": "ls"}}]'
HERMES_LS = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'
XLAM_LS = '[{"name": "bash", "arguments": {"command": "ls"}}]'


def read(name: str, reasoning: str, text: str, tail: str = "", *, with_tools: bool = True) -> ParsedReply:
    """Reads the reply; asserts that it is the same whole and in single characters."""
    replies = []
    for pieces in ([text], list(text)):
        parser = ReplyFormat.choose(name, reasoning, None).parser(TOOLS if with_tools else None, tail)
        reply = ParsedReply()
        for piece in pieces:
            reply.add(parser.feed(piece))
        reply.add(parser.finish())
        replies.append(reply)
    whole, cut = replies
    assert summary(whole) == summary(cut)
    return whole


def summary(reply: ParsedReply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.reasoning, reply.content, [(call.name, call.arguments) for call in reply.calls]


@pytest.mark.parametrize("with_tools", [True, False])
@pytest.mark.parametrize(
    ("name", "reasoning", "tail", "text", "thought", "said"),
    [
        (
            *("cohere", "cohere", "<|START_THINKING|>"),
            "Hm.<|END_THINKING|><|START_RESPONSE|>Two <co>lines</co: 0:[1]>.<|END_RESPONSE|>",
            *("Hm.", "Two <co>lines</co: 0:[1]>."),
        ),
        (
            *("cohere_command4", "cohere_command4", ""),
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
            *("Hm.", "Yes."),
        ),
        ("none", "cohere", "", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "", "Yes."),
        ("cohere", "none", "", "Without tags.", "", "Without tags."),
        ("cohere", "none", "", "It writes <|START_RESPONSE|>.", "", "It writes <|START_RESPONSE|>."),
        ("cohere", "none", "", "<|START_RESPONSE|>It is cut o", "", "It is cut o"),
        (
            *("ernie45", "ernie45", "<think>\n"),
            "Hm.\n</think>\n\n\n<response>\nTwo\nlines.\n</response>\n",
            *("Hm.", "Two\nlines."),
        ),
        ("ernie45", "ernie45", "<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("none", "ernie45", "<think>\n", "Hm.</think>\n<response>\nYes.\n</response>", "Hm.", "Yes."),
        (
            *("ernie45", "none", ""),
            "<response>\nIts XML: <response>1</response>, then\n</response>\nis the end.\n</response>\n",
            *("", "Its XML: <response>1</response>, then\n</response>\nis the end."),
        ),
        ("ernie45", "none", "", "An element <response> of XML.", "", "An element <response> of XML."),
    ],
)
def test_the_tags_around_an_answer_are_no_content(
    name: str, reasoning: str, tail: str, text: str, thought: str, said: str, with_tools: bool
) -> None:
    """The tags are removed with and without tools, also by the reasoning parser alone; else they stay."""
    reply = read(name, reasoning, text, tail, with_tools=with_tools)
    assert (reply.reasoning, reply.content, reply.calls) == (thought, said, [])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("cohere", f"<|START_ACTION|>{COHERE_LS}<|END_ACTION|>", "", [LS]),
        (
            "cohere",
            f"<|START_RESPONSE|>Look:<|END_RESPONSE|><|START_ACTION|>{COHERE_LS}<|END_ACTION|>",
            *("Look:", [LS]),
        ),
        ("cohere", '<|START_ACTION|>{"tool_name": "get.time", "parameters": {}}<|END_ACTION|>', "", [NOW]),
        ("cohere", '<|START_ACTION|>[{"name": "get.time", "arguments": {}}', "", [NOW]),
        ("cohere", "<|START_ACTION|>[nothing]<|END_ACTION|>", "<|START_ACTION|>[nothing]<|END_ACTION|>", []),
        ("ernie45", f"<response>\nLook:\n</response>\n\n{HERMES_LS}\n", "Look:", [LS]),
        ("ernie45", f"{HERMES_LS}\n{HERMES_LS}\n", "", [LS, LS]),
        (
            "internlm",
            (
                'Look:<|action_start|><|plugin|>\n{"name": "bash", "parameters": {"command": "ls"}}'
                '<|action_end|><|action_start|><|plugin|>{"name": "get.time", "parameters": {}}<|action_end|>'
            ),
            *("Look:", [LS, NOW]),
        ),
        (
            "internlm",
            "<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
            *("<|action_start|><|interpreter|>\nprint(1)<|action_end|>", []),
        ),
        ("gigachat3", 'function call<|role_sep|>\n{"name": "get.time", "arguments": {}}', "", [NOW]),
        (
            "gigachat3",
            'Look:<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "get.time", "arguments": {}}',
            *("Look:", [NOW]),
        ),
        (
            "gigachat3",
            'Look:<|function_call|>{"name": "bash", "arguments": {"command": "ls"}}<|message_sep|>',
            *("Look:", [LS]),
        ),
        ("gigachat3", "A function call is one.", "A function call is one.", []),
        (
            "olmo3",
            "Look:<function_calls>bash(command=\"ls\")\nget.time()\nbash(command='ls')</function_calls>",
            *("Look:", [LS, NOW, LS]),
        ),
        ("olmo3", "<function_calls>\n[bash(command='ls'), get.time()]\n</function_calls>\n", "", [LS, NOW]),
        ("olmo3", "<function_calls>none</function_calls>", "<function_calls>none</function_calls>", []),
        ("xlam", XLAM_LS, "", [LS]),
        ("xlam", f"Look:\n```json\n{XLAM_LS}\n```", "Look:", [LS]),
        ("xlam", f"[TOOL_CALLS]{XLAM_LS}", "", [LS]),
        ("xlam", f"[TOOL_CALLS] {XLAM_LS}", "", [LS]),
        ("xlam", f"<tool_call>{XLAM_LS}</tool_call>", "", [LS]),
        ("xlam", '{"name": "get.time", "arguments": {}}', "", [NOW]),
        ("xlam", '[{"name": "somebody", "arguments": {}}]', '[{"name": "somebody", "arguments": {}}]', []),
        ("xlam", "[TOOL_CALLS] are none.", "[TOOL_CALLS] are none.", []),
    ],
)
def test_calls_are_read_in_every_envelope(name: str, text: str, content: str, calls: list[Call]) -> None:
    reply = read(name, "none", text)
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == calls
    assert reply.content == content


@pytest.mark.parametrize(
    ("name", "reasoning", "tail", "text"),
    [
        ("cohere", "cohere", "", f"<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>{COHERE_LS}"),
        ("cohere", "cohere", "", f"<|START_THINKING|>Hm.<|START_ACTION|>{COHERE_LS}<|END_ACTION|>"),
        ("ernie45", "ernie45", "<think>\n", f"Hm.\n</think>\n\n\n{HERMES_LS}\n"),
        ("olmo3", "olmo3", "<think>", "Hm.</think><function_calls>bash(command='ls')</function_calls>"),
        ("xlam", "think", "<think>", f"Hm.</think>{XLAM_LS}"),
    ],
)
def test_calls_come_after_thoughts(name: str, reasoning: str, tail: str, text: str) -> None:
    reply = read(name, reasoning, text, tail)
    assert (reply.reasoning, reply.content) == ("Hm.", "")
    assert [(call.name, json.loads(call.arguments)) for call in reply.calls] == [LS]


@settings(max_examples=150)
@given(
    st.sampled_from(["cohere", "ernie45", "none"]),
    st.lists(
        st.sampled_from(
            [
                *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<response>", "</response>", "\n", " ", "a", "<"),
                *(HERMES_LS, f"<|START_ACTION|>{COHERE_LS}<|END_ACTION|>", "<tool_call>", "</think>"),
            ]
        ),
        max_size=9,
    ),
    st.booleans(),
)
def test_frames_anywhere_are_read_alike_however_they_are_cut(
    name: str, pieces: list[str], with_tools: bool
) -> None:
    """Any cuts give the same result, and no letter of the text is lost."""
    reasoning = "cohere" if name == "cohere" else "ernie45"
    reply = read(name, reasoning, "".join(pieces), with_tools=with_tools)
    assert reply.content.count("a") + reply.reasoning.count("a") >= pieces.count("a")

"""Formats of several messages: which are reasoning, which are calls, and what only looks like them."""

from __future__ import annotations

import json

import pytest

from engine.tool_parsers import ParsedReply
from engine.tool_parsers.formats import ReplyFormat
from tests.tool_parsers.family import TOOLS

ATEM = (
    '<atem:function_calls>\n<atem:invoke name="bash">\n<atem:parameter name="command">ls -l'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
)
JSON_CALL = '<|content_invoke_tool_json|>{"name": "bash", "args": {"command": "ls -l"}}'
TO_TOOL = f" to=bash<|message|>\n{ATEM}<|eom|>"
LS = [("bash", {"command": "ls -l"})]
HM = "<|content_thinking|>Hm.<|end_message|>"
NEXT = "<|start|>assistant"
CASES = {
    "muse thinks, says, calls": (
        "muse",
        f" to=self<|message|>Hm.<|eom|>{NEXT} to=commentary<|message|>I look.<|eom|>{NEXT}{TO_TOOL}",
        ("Hm.", "I look.", LS),
    ),
    "muse thinks between two calls": (
        "muse",
        f"{TO_TOOL}{NEXT} to=self<|message|>Once more.<|eom|>{NEXT}{TO_TOOL}",
        ("Once more.", "", LS * 2),
    ),
    "muse drafts a call in its thoughts": (
        "muse",
        f" to=self<|message|>{ATEM}<|eom|>{NEXT} to=user<|message|>Done.<|eot|>",
        (ATEM, "Done.", []),
    ),
    "muse shows a call to the user": (
        "muse",
        f" to=user<|message|>So: {ATEM}<|eot|>",
        ("", f"So: {ATEM}", []),
    ),
    "muse names nobody": ("muse", "<|message|>Hm.<|eom|>", ("Hm.", "", [])),
    "muse leaves out the end of a thought": (
        "muse",
        f" to=self<|message|>Hm.{NEXT}{TO_TOOL}",
        ("Hm.", "", LS),
    ),
    "muse says something beside its call": (
        "muse",
        f" to=bash<|message|>I look.\n{ATEM}<|eom|>",
        ("", "I look.", LS),
    ),
    "inkling thinks, says, calls": (
        "inkling",
        f"{HM}<|message_model|><|content_text|>I look.<|end_message|><|message_model|>{JSON_CALL}",
        ("Hm.", "I look.", LS),
    ),
    "inkling calls twice": (
        "inkling",
        f"{JSON_CALL}<|end_message|><|message_model|>{JSON_CALL}<|content_model_end_sampling|>",
        ("", "", LS * 2),
    ),
    "inkling drafts a call in its thoughts": (
        "inkling",
        '<|content_thinking|>{"name": "bash", "args": {}}<|end_message|><|content_text|>Done.<|end_message|>',
        ('{"name": "bash", "args": {}}', "Done.", []),
    ),
    "inkling leaves out all ends": (
        "inkling",
        f"<|content_thinking|>Hm.<|message_model|><|content_text|>I look.<|message_model|>{JSON_CALL}",
        ("Hm.", "I look.", LS),
    ),
}


def parsed(name: str, pieces: list[str], prompt_tail: str = "", *, tools: bool = True) -> ParsedReply:
    parser = ReplyFormat.choose(name, name, None).parser(TOOLS if tools else None, prompt_tail)
    reply = ParsedReply()
    for piece in pieces:
        reply.add(parser.feed(piece))
    reply.add(parser.finish())
    return reply


@pytest.mark.parametrize("name", CASES)
def test_each_message_is_what_its_head_says(name: str) -> None:
    """Each message is read by its head, whole and letter by letter."""
    family, text, expected = CASES[name]
    for pieces in ([text], list(text)):
        reply = parsed(family, pieces)
        calls = [(call.name, json.loads(call.arguments)) for call in reply.calls]
        assert (reply.reasoning, reply.content, calls) == expected


@pytest.mark.parametrize(
    ("name", "prompt_tail", "text"),
    [
        ("muse", f"<|eot|>{NEXT} to=self<|message|>First,", f" think.<|eom|>{NEXT} to=user<|message|>Done."),
        (
            "inkling",
            "<|message_model|><|content_thinking|>First,",
            " think.<|end_message|><|content_text|>Done.",
        ),
    ],
)
def test_a_response_goes_on_where_its_prompt_ends(name: str, prompt_tail: str, text: str) -> None:
    reply = parsed(name, [text], prompt_tail)
    assert (reply.reasoning, reply.content) == (" think.", "Done.")


@pytest.mark.parametrize(("name", "text"), [("muse", TO_TOOL), ("inkling", JSON_CALL)])
def test_without_tools_nothing_is_called(name: str, text: str) -> None:
    reply = parsed(name, [text], tools=False)
    assert reply.calls == []
    assert "ls -l" in reply.content


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<|start|>assistant to=self<|message|>{{ m }}<|eom|><atem:function_calls>", "muse"),
        ("<|message_model|><|content_thinking|>{{ m }}<|content_invoke_tool_json|>", "inkling"),
    ],
)
def test_a_template_shows_its_messages(template: str, name: str) -> None:
    chosen = ReplyFormat.choose("auto", "auto", template)
    assert chosen.messages == ReplyFormat.choose(name, name, None).messages
    assert chosen.tool_format == ReplyFormat.choose(name, "none", None).tool_format

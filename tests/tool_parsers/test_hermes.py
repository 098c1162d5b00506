"""Promises of the Hermes parser: what is a call, what is content, and that cuts never matter."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.tool_parsers import (
    ContentDelta,
    HermesToolParser,
    ParsedReply,
    ReplyDelta,
    ToolCallDelta,
    read_reply,
)

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls -l"}}\n</tool_call>'


def parse(text: str) -> tuple[str, list[tuple[str, str]]]:
    parser = HermesToolParser()
    content, calls = summary(read_reply(parser, text))
    return content + parser.cut_head, calls


def summary(reply: ParsedReply) -> tuple[str, list[tuple[str, str]]]:
    return reply.content, [(call.name, call.arguments) for call in reply.calls]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("just text", "just text", []),
        ("", "", []),
        (CALL, "", [("bash", '{"command": "ls -l"}')]),
        ("Let me look.\n" + CALL, "Let me look.", [("bash", '{"command": "ls -l"}')]),
        (CALL + "\n" + CALL + "\n", "", [("bash", '{"command": "ls -l"}')] * 2),
        (CALL + "\ndone", "\ndone", [("bash", '{"command": "ls -l"}')]),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', "", [("f", '{"a": [1]}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "raw"}</tool_call>', "", [("f", "raw")]),
    ],
)
def test_reads_calls_and_content(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Calls are found anywhere, and the text around them is content."""
    assert parse(text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "a < b and a <tool",
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "f"</tool_call> and more',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>["f"]</tool_call>',
        '<tool_call>{"name": "f", "argu',
        '\n<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>',
        "text\n<tool_call>\n",
        "<tool_call>" + '{"name":' * 5000,
    ],
)
def test_what_is_not_a_call_stays_content(text: str) -> None:
    """A malformed call falls back to content without losing a character."""
    assert parse(text) == (text, [])


def test_a_good_call_after_a_broken_one_is_read() -> None:
    """One broken tag does not hide the calls after it."""
    assert parse("<tool_call>oops " + CALL) == ("<tool_call>oops ", [("bash", '{"command": "ls -l"}')])


def test_a_closing_tag_inside_an_argument_is_argument() -> None:
    """Tags and braces inside JSON strings belong to the argument."""
    arguments = json.dumps({"command": 'echo "}</tool_call><tool_call>{" \\ é'}, ensure_ascii=False)
    assert parse(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>') == (
        "",
        [("f", arguments)],
    )


def test_arguments_broken_after_the_name_was_given_end_at_the_closing_tag() -> None:
    """Once the name went out, broken arguments are shown as they are; what follows is content."""
    text = '<tool_call>{"name": "f", "arguments": {"a": </tool_call>tail'
    assert parse(text) == ("tail", [("f", '{"a": ')])


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_reply_that_ends_within_the_closing_tag_is_a_whole_call(cut: int) -> None:
    """A stop in the middle of the closing tag loses nothing."""
    assert parse(CALL[:-cut]) == ("", [("bash", '{"command": "ls -l"}')])


def test_the_name_comes_first_and_the_arguments_follow_piece_by_piece() -> None:
    """A client sees the call before its arguments are complete."""
    parser = HermesToolParser()
    seen: list[ReplyDelta] = []
    for char in CALL:
        seen.extend(parser.feed(char))
    calls = [delta for delta in seen if isinstance(delta, ToolCallDelta)]
    assert len(calls) == len(seen)
    assert (calls[0].name, calls[0].arguments) == ("bash", "")
    assert (calls[0].call_id or "").startswith("call_")
    assert [delta.arguments for delta in calls[1:]] == list('{"command": "ls -l"}')


def test_plain_text_is_not_held_back() -> None:
    """Only a possible beginning of a tag waits for the next piece."""
    parser = HermesToolParser()
    assert parser.feed("a <b> <tool_") == [ContentDelta("a <b> ")]
    assert parser.feed("x") == [ContentDelta("<tool_x")]


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "\n", " ", "{", "}", '"', "\\", "<", "text", ",", "é", CALL),
        *('"name": "f", ', '{"name": "f", "arguments": {', '"a": "x</tool_call>"'),
        '{"arguments": {"b": 1}, "name": "g"}',
    ]
)


@given(text=st.lists(PIECES, max_size=12).map("".join), data=st.data())
def test_the_cuts_never_matter(text: str, data: st.DataObject) -> None:
    """Any way to cut a reply gives the same content and calls as the whole."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser, reply = HermesToolParser(), ParsedReply()
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        reply.add(parser.feed(text[start:end]))
    reply.add(parser.finish())
    content, calls = summary(reply)
    assert (content + parser.cut_head, calls) == parse(text)


@given(text=st.lists(PIECES, max_size=12).map("".join))
def test_one_character_at_a_time_is_the_same_too(text: str) -> None:
    """The finest cut gives the same result as the whole."""
    parser, reply = HermesToolParser(), ParsedReply()
    for char in text:
        reply.add(parser.feed(char))
    reply.add(parser.finish())
    content, calls = summary(reply)
    assert (content + parser.cut_head, calls) == parse(text)

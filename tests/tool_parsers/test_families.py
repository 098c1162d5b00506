"""Promises of every format's parser: it reads templates' output, cuts never matter, and nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tool_parsers import ParsedReply, ToolCallDelta
from engine.tool_parsers.formats import ReplyFormat
from tests.tool_parsers.families import CALLS, COMMON_PIECES, FAMILIES, TOOLS, Family

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.name}")


def calls_of(reply: ParsedReply) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


def summary(reply: ParsedReply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.content, reply.reasoning, [(call.name, call.arguments) for call in reply.calls]


def read_in_pieces(family: Family, pieces: list[str]) -> ParsedReply:
    parser, reply = ReplyFormat.choose(family.name, "none", None).parser(TOOLS, ""), ParsedReply()
    for piece in pieces:
        reply.add(parser.feed(piece))
    reply.add(parser.finish())
    return reply


@each_family
@pytest.mark.parametrize("content", ["", "Let me look.", "Two lines,\n\nof [text] & <b>."])
@pytest.mark.parametrize("num_calls", [1, 2, 5])
def test_what_the_template_writes_is_read_back(family: Family, content: str, num_calls: int) -> None:
    """An answer with calls, rendered by the model's own template, is read as these calls and this content."""
    content = "" if family.name == "json" else content
    reply = family.read(family.render(content, CALLS[:num_calls]))
    assert calls_of(reply) == CALLS[:num_calls]
    assert reply.content.strip("\n") == content


@each_family
def test_one_character_at_a_time_is_read_the_same(family: Family) -> None:
    """The finest cut gives the same result as the whole."""
    text = family.render("Look:" if family.name != "json" else "", CALLS)
    assert summary(read_in_pieces(family, list(text))) == summary(family.read(text))


@each_family
def test_arguments_are_streamed(family: Family) -> None:
    """A long argument arrives in many pieces, after the name; Python's values arrive one at a time."""
    text = family.render("", [("bash", {"command": "x" * 100, "note": "y" * 100})])
    parser = ReplyFormat.choose(family.name, "none", None).parser(TOOLS, "")
    deltas = [delta for char in text for delta in parser.feed(char)]
    calls = [delta for delta in deltas if isinstance(delta, ToolCallDelta)]
    assert calls == deltas
    assert (calls[0].name, calls[0].arguments) == ("bash", "")
    assert all(delta.name is None and delta.call_id is None for delta in calls[1:])
    assert len(calls) > (2 if family.name in ("pythonic", "lfm2", "olmo3") else 200)


@each_family
@settings(max_examples=40)
@given(data=st.data())
def test_the_cuts_never_matter(family: Family, data: st.DataObject) -> None:
    """Any text, cut anywhere, is read like the whole; without a call, all but tags is content."""
    pieces = st.sampled_from([*family.pieces, *COMMON_PIECES])
    text = "".join(data.draw(st.lists(pieces, max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    whole = family.read(text)
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert summary(read_in_pieces(family, parts)) == summary(whole)
    assert summary(read_in_pieces(family, list(text))) == summary(whole)
    if not whole.calls and not (family.messages and any(tag in text for tag in HEADS_END)):
        assert without_markup(family, whole.content) == without_markup(family, text)


HEADS_END = ("<|message|>", "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>")
"""The ends of a message's head, which is not content."""


def without_markup(family: Family, text: str) -> str:
    """The text without the format's tags: tags that enclose nothing are layout."""
    tool_format = ReplyFormat.choose(family.name, "none", None).tool_format
    assert tool_format is not None
    tags = {*tool_format.tags, *tool_format.ends_thinking, *tool_format.begins_call, "[]", "</tool_calls>"}
    tags |= {"<function=", "<|close|>tools<|sep|>", "<|call|>", "<|end|>"}
    tags |= {tag.replace("<", "</", 1) for tag in tags} | {tag.replace("<tool", "</tool") for tag in tags}
    for tag in sorted(tags - {"{", "["}, key=len, reverse=True):
        text = text.replace(tag, "")
    return "".join(text.split())


words = st.text("ab c.,\n?é😀", max_size=20)
values = st.one_of(
    st.text(max_size=20).filter(lambda text: "</" not in text),
    st.integers(-(2**53), 2**53),
    st.booleans(),
    st.none(),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text("abc", min_size=1), st.text(max_size=5), max_size=3),
)
KEY_OF: dict[type, str] = {
    str: "command",
    int: "seconds",
    bool: "again",
    type(None): "note",
    list: "names",
    dict: "options",
}


@each_family
@settings(max_examples=40)
@given(data=st.data())
def test_calls_between_text_are_read_whole(family: Family, data: st.DataObject) -> None:
    """Every argument and every word of text and well-formed calls arrives, wherever the reply is cut."""
    content = "" if family.name == "json" else data.draw(words).strip()
    drawn = [
        value
        for value in data.draw(st.lists(values, max_size=4))
        if not (family.guesses and isinstance(value, list | dict))
    ]
    arguments = {KEY_OF[type(value)]: value for value in drawn}
    calls = [(data.draw(st.sampled_from(["bash", "get.time"])), arguments), ("bash", {})]
    text = family.render(content, calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    reply = read_in_pieces(family, parts)
    assert reply.content.strip() == content
    assert calls_of(reply) == calls


@each_family
def test_a_reply_cut_off_anywhere_is_still_read(family: Family) -> None:
    """Whatever the length limit leaves of a reply, the calls before the cut are whole and in order."""
    text = family.render("", CALLS)
    for length in range(len(text)):
        reply = family.read(text[:length])
        assert [call.name for call in reply.calls] == [name for name, _ in CALLS[: len(reply.calls)]]
        assert calls_of_whole(reply) == CALLS[: max(0, len(reply.calls) - 1)]


def calls_of_whole(reply: ParsedReply) -> list[tuple[str, dict[str, Any]]]:
    """All calls but the last, which may be incomplete."""
    return [(call.name, json.loads(call.arguments)) for call in reply.calls[:-1]]

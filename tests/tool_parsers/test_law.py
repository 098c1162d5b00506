"""The law of all readers: every word of a reply is in its arguments, in the format's markup or in the shown
text.

A call with a slip (a tag too many, missing, misspelt or in the wrong place, text where none belongs) may
become a call, content, or arguments with ``INVALID_JSON``: no word of it is lost.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.tool_parsers import ParsedReply
from engine.tool_parsers.catalog import TOOL_FORMATS
from engine.tool_parsers.formats import ReplyFormat
from tests.tool_parsers.families import FAMILIES, TOOLS, Family

each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.name}")

ARGUMENTS: list[dict[str, Any]] = [
    {"command": "qalpha qbeta", "seconds": 71001},
    {"command": "qgamma", "note": "qdelta"},
    {"names": ["qepsilon", "qzeta"]},
]
WORD = re.compile(r"q(?:alpha|beta|gamma|delta|epsilon|zeta|stray|other)|71001")
"""Words that are in no tag and no tool's name."""
_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")


def read(family: Family, pieces: list[str], reasoning: str = "none") -> ParsedReply:
    parser = ReplyFormat.choose(family.name, reasoning, None).parser(TOOLS, "")
    reply = ParsedReply()
    for piece in pieces:
        reply.add(parser.feed(piece))
    reply.add(parser.finish())
    return reply


def seen(reply: ParsedReply) -> str:
    """All that a client sees of a reply, with arguments as they are after parsing."""
    texts = [reply.content, reply.reasoning]
    for call in reply.calls:
        texts.append(call.name)
        try:
            texts.append(json.dumps(json.loads(call.arguments), ensure_ascii=False))
        except ValueError:  # the reply's end cut it off: no client runs it
            texts.append(call.arguments)
    return "\n".join(texts)


def summary(reply: ParsedReply) -> tuple[str, str, list[tuple[str, str]]]:
    return reply.content, reply.reasoning, [(call.name, call.arguments) for call in reply.calls]


@st.composite
def slips(draw: st.DrawFn, family: Family) -> str:
    """A reply of one or two calls with a few random slips."""
    arguments = draw(st.permutations(ARGUMENTS))[: draw(st.integers(1, 2))]
    calls = [("bash", each) for each in arguments]
    text = family.render("" if family.name == "json" else "qother", calls)
    for _ in range(draw(st.integers(1, 3))):
        tokens = _TOKEN.findall(text)
        markup = [index for index, token in enumerate(tokens) if not WORD.search(token)]
        at = draw(st.sampled_from(markup))
        kind = draw(st.sampled_from(["leave out", "twice", "stray", "piece", "double piece", "misspell"]))
        if kind == "leave out":
            tokens[at] = ""
        elif kind == "twice":
            tokens[at] *= 2
        elif kind == "misspell":
            tokens[at] = tokens[at][1:] if len(tokens[at]) > 2 else tokens[at]
        else:
            extra = " qstray " if kind == "stray" else draw(st.sampled_from(family.pieces))
            tokens[at] += extra if kind != "double piece" else extra * 2
        text = "".join(tokens)
    return text


@each_family
@settings(max_examples=60)
@given(data=st.data())
def test_no_word_of_a_call_is_lost(family: Family, data: st.DataObject) -> None:
    """Whatever is wrong in a call, all its words arrive, however the reply is cut."""
    text = data.draw(slips(family))
    whole = read(family, [text])
    if family.name == "openai":  # a header's words are about the message
        text = re.sub(r"(<\|channel\|>[^<]*) qstray ", r"\1", text)
        whole = read(family, [text])
    if family.name == "mistral":  # an id is markup: one that its templates would refuse is replaced
        text = re.sub(r'("id": ")[^"]*', r"\1", text)
        whole = read(family, [text])
    missing = set(WORD.findall(text)) - set(WORD.findall(seen(whole)))
    assert not missing, (text, summary(whole))
    for pieces in (list(text), _TOKEN.findall(text)):
        assert summary(read(family, pieces)) == summary(whole)


@each_family
@pytest.mark.parametrize("key", ["args", "input", "kwargs"])
def test_no_call_is_made_without_what_was_written_for_it(family: Family, key: str) -> None:
    """Arguments under another name, or next to the function's, never become an empty object."""
    text = family.render("", [("bash", {"command": "qalpha"})])
    for written in (
        text.replace('"arguments"', f'"{key}"').replace('"parameters"', f'"{key}"'),
        re.sub(r'"(?:arguments|parameters)": \{(.*?)\}', r"\1", text),
    ):
        reply = read(family, [written])
        assert "qalpha" in seen(reply), (written, summary(reply))
        assert all(json.loads(call.arguments) for call in reply.calls), (written, summary(reply))


def test_every_format_is_among_the_families() -> None:
    """A new format must be added here, so that the law is tested with it."""
    assert set(TOOL_FORMATS) - {ReplyName for family in FAMILIES for ReplyName in _names(family)} == set()


def _names(family: Family) -> set[str]:
    chosen = ReplyFormat.choose(family.name, "none", None).tool_format
    return {name for name, tool_format in TOOL_FORMATS.items() if tool_format is chosen}

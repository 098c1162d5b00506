"""Promises of the choice of parsers, by name, chat template or plug-in, and of reasoning before calls."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from continuum.cli.serve_args import server_config
from continuum.cli.serve_flags import add_serve_arguments
from engine.api.config import ServerConfig
from engine.errors import ConfigError
from engine.tool_parsers import ParsedReply, read_reply
from engine.tool_parsers.catalog import (
    REASONING_PARSERS,
    THINK_TAGS,
    TOOL_CALL_PARSERS,
    TOOL_FORMATS,
)
from engine.tool_parsers.formats import ReplyFormat, load_plugin
from tests.tool_parsers.families import FAMILIES, HERMES, TOOLS, Family

LLAMA3_SENTENCE = 'Environment: ipython. Respond in the format {"name": name, "parameters": dictionary}.'
PYTHONIC_SENTENCE = "Environment: ipython. Use exact format: [func_name1(param1=value1), func_name2(...)]"

WITHOUT_SIGNS = ("json", "glm47", "llama3_json", "pythonic", "phi4_mini_json", "xlam", "gigachat3", "mimo")
"""No model's own format, an alias, or one that only the template's text on tools shows."""


@pytest.mark.parametrize(
    ("template", "name"),
    [
        *((family.template, family.name) for family in FAMILIES if family.name not in WITHOUT_SIGNS),
        (LLAMA3_SENTENCE, "llama3_json"),
        (PYTHONIC_SENTENCE, "pythonic"),
        ("user<|role_sep|>\n{{ messages[0].content }}<|message_sep|>", "gigachat3"),
        ("{{ messages[-1].content }}", None),
        (None, None),
    ],
)
def test_the_template_shows_the_format(template: str | None, name: str | None) -> None:
    """``auto`` finds the format by what the template writes for calls; otherwise it chooses no parser."""
    chosen = ReplyFormat.choose("auto", "none", template).tool_format
    assert chosen == (None if name is None else TOOL_FORMATS[name])


@pytest.mark.parametrize(
    ("template", "reply", "reasoning"),
    [
        ("{{ '<think>' + message.reasoning_content + '</think>' }}", "<think>\nHm.\n</think>\n\nYes.", "Hm."),
        ("[THINK]{{ message.thinking }}[/THINK]", "[THINK]Hm.[/THINK]Yes.", "Hm."),
        (
            "<|channel|>analysis<|message|>",
            "<|channel|>analysis<|message|>Hm.<|end|><|channel|>final<|message|>Yes.",
            "Hm.",
        ),
        ("{{ message.content }}", "Yes.", ""),
    ],
)
def test_the_template_shows_the_thoughts(template: str, reply: str, reasoning: str) -> None:
    """``auto`` finds how reasoning is marked."""
    read = read_reply(ReplyFormat.choose("none", "auto", template).parser(None, ""), reply)
    assert (read.reasoning, read.content) == (reasoning, "Yes.")


def test_every_name_is_known() -> None:
    """Every listed name makes a parser; another name is refused with the list."""
    for name in TOOL_CALL_PARSERS:
        ReplyFormat.choose(name, "none", None).parser(TOOLS, "").feed("text")
    for name in REASONING_PARSERS:
        ReplyFormat.choose("none", name, None).parser(None, "").feed("text")
    with pytest.raises(ConfigError, match=r"^tool_call_parser must be one of auto, none, .*, got 'x'\.$"):
        ReplyFormat.choose("x", "none", None)
    with pytest.raises(ConfigError, match=r"^reasoning_parser must be one of auto, none, .*, got 'x'\.$"):
        ReplyFormat.choose("none", "x", None)


def test_special_tokens_are_kept_where_a_parser_must_see_them() -> None:
    """Special tokens are kept only if the tokenizer has the format's tags as special tokens."""
    assert not ReplyFormat.choose("hermes", "none", None, {"<|im_end|>": 1}).needs_special_tokens
    assert ReplyFormat.choose("hermes", "none", None, {"<tool_call>": 1}).needs_special_tokens
    assert ReplyFormat.choose("hermes", "think", None, {"</think>": 1}).needs_special_tokens
    assert ReplyFormat.choose("none", "openai_gptoss", None, {"<|channel|>": 1}).needs_special_tokens
    assert ReplyFormat.choose("mistral", "none", None).needs_special_tokens
    assert not ReplyFormat.choose("none", "none", None).needs_special_tokens


CALL = HERMES.render("", [("bash", {"command": "ls"})])


@pytest.mark.parametrize(
    ("name", "prompt_tail", "reply", "expected"),
    [
        ("think", "", "<think>\na\n</think>\n\nb", ("a", "b")),
        ("think", "", "b </think>", ("", "b ")),
        ("think", "", "  b", ("", "  b")),
        ("think", "", "<think>a", ("a", "")),
        ("think", "", "<think></think>", ("", "")),
        ("think", "", "<thin", ("", "<thin")),
        ("think", "<think>\n", "a</think>b", ("a", "b")),
        ("think", "<think>\n", "<think>a</think>b", ("a", "b")),
        ("think", "<think>\n\n</think>\n\n", "<think>", ("", "<think>")),
        ("think", "<think>\nI", " go on</think>b", ("go on", "b")),
        ("think", "what is <think>?<|im_end|>\n<|im_start|>assistant\n", "b", ("", "b")),
        ("deepseek_r1", "", "a</think>b", ("a", "b")),
        ("deepseek_r1", "", "<think>a</think>b", ("a", "b")),
        ("deepseek_r1", "</think>", "b", ("", "b")),
        ("mistral", "", "[THINK]a[/THINK]b", ("a", "b")),
    ],
)
def test_where_thoughts_begin_and_end(
    name: str, prompt_tail: str, reply: str, expected: tuple[str, str]
) -> None:
    """The begin of reasoning may be in the reply, in the prompt, or implied."""
    for pieces in ([reply], list(reply)):
        parser, read = ReplyFormat.choose("hermes", name, None).parser(TOOLS, prompt_tail), ParsedReply()
        for piece in pieces:
            read.add(parser.feed(piece))
        read.add(parser.finish())
        assert (read.reasoning, read.content) == expected


def test_a_call_in_the_thoughts_is_none_unless_only_calls_have_its_tag() -> None:
    """A call in reasoning is a draft; but a tag that only calls have is never part of reasoning."""
    thinking = ReplyFormat.choose("hermes", "think", None)
    read = read_reply(thinking.parser(TOOLS, ""), f"<think>maybe {CALL}?</think>{CALL}")
    assert (read.reasoning, len(read.calls)) == (f"maybe {CALL}?", 1)
    for name in ("deepseek_v31", "mistral", "kimi_k2", "deepseek_v32", "qwen3_coder"):
        family = next(family for family in FAMILIES if family.name == name)
        text = "<think>Now." + family.render("", [("bash", {"command": "ls"})]).lstrip("\n")
        read = read_reply(ReplyFormat.choose(name, "think", None).parser(TOOLS, ""), text)
        assert (read.reasoning, read.content, len(read.calls)) == ("Now.", "", 1), name


each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.name}")


@each_family
@settings(max_examples=25)
@given(data=st.data())
def test_with_thoughts_the_cuts_do_not_matter_either(family: Family, data: st.DataObject) -> None:
    """Reasoning, content and calls of any text are the same for every way to cut it."""
    reply_format = ReplyFormat.choose(family.name, data.draw(st.sampled_from(["think", "deepseek_r1"])), None)
    pieces = st.sampled_from([*family.pieces, "<think>", "</think>", "\n", " ", "a", "<", "é", "{", "}"])
    text = "".join(data.draw(st.lists(pieces, max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    prompt_tail = data.draw(st.sampled_from(["", "<think>\n", "</think>\n\n"]))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    summaries = []
    for way in ([text], parts, list(text)):
        parser, read = reply_format.parser(TOOLS, prompt_tail), ParsedReply()
        for piece in way:
            read.add(parser.feed(piece))
        read.add(parser.finish())
        calls = [(call.name, call.arguments) for call in read.calls]
        summaries.append((read.reasoning, read.content, calls))
    assert summaries[0] == summaries[1] == summaries[2]


PLUGIN = '''
from engine.tool_parsers import ContentDelta, ToolCallDelta
from engine.tool_parsers.formats import register_tool_parser


class ShoutParser:
    """What ends with ! is the name of a function to call."""

    def __init__(self, tools):
        self._names = [tool["function"]["name"] for tool in tools]
        self._text = ""

    def feed(self, text):
        self._text += text
        return []

    def finish(self):
        name = self._text.removesuffix("!")
        if self._text.endswith("!") and name in self._names:
            return [ToolCallDelta(0, "call_1", name, "{}")]
        return [ContentDelta(self._text)]


register_tool_parser("shout", ShoutParser)
'''


def test_a_parser_of_ones_own(tmp_path: Path) -> None:
    """A plug-in's parser is chosen by its name, gets the request's tools, and works after reasoning."""
    path = tmp_path / "shout.py"
    path.write_text(PLUGIN)
    load_plugin(str(path))
    parser = ReplyFormat.choose("shout", "think", None).parser(TOOLS, "")
    read = read_reply(parser, "<think>Loud.</think>bash!")
    assert (read.reasoning, [call.name for call in read.calls]) == ("Loud.", ["bash"])


def test_the_command_line_chooses(tmp_path: Path) -> None:
    """The server's flags take the same names, also a plug-in's, and refuse others at once."""
    path = tmp_path / "loud.py"
    path.write_text(PLUGIN.replace('"shout"', '"loud"'))
    arguments = argparse.ArgumentParser()
    add_serve_arguments(arguments)

    def config(*flags: str) -> ServerConfig:
        return server_config(arguments.parse_args(["m", *flags]))

    plugged = config(
        "--tool-call-parser", "loud", "--tool-parser-plugin", str(path), "--reasoning-parser", "none"
    )
    assert read_reply(plugged.reply_format(None).parser(TOOLS, ""), "bash!").calls
    named = config("--tool-call-parser", "glm47", "--reasoning-parser", "qwen3").reply_format(None)
    assert (named.tool_format, named.think_tags) == (TOOL_FORMATS["glm45"], THINK_TAGS["think"])
    with pytest.raises(ConfigError, match="tool_call_parser must be one of"):
        config("--tool-call-parser", "x")
    with pytest.raises(ConfigError, match="reasoning_parser must be one of"):
        config("--reasoning-parser", "x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", r"cannot load '.*plugin.py': division by zero\."),
        ("def", r"cannot load '.*plugin.py': invalid syntax .*\."),
        ("x = 1", r"'.*plugin.py' does not call register_tool_parser\."),
        (None, r"cannot load '.*plugin.py': .*No such file or directory.*\."),
    ],
)
def test_a_broken_plugin_is_one_sentence(tmp_path: Path, text: str | None, said: str) -> None:
    """A broken plug-in is refused at start-up with the file's path and the cause."""
    path = tmp_path / "plugin.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="^tool_parser_plugin: " + said):
        load_plugin(str(path))


def test_replies_that_were_forced_to_call_in_json() -> None:
    """Where a format's calls cannot be forced, a JSON list of calls is read, after reasoning too."""
    calls = json.dumps([{"name": "bash", "arguments": {"command": "ls"}}])
    for name in ("qwen3_coder", "openai", "none"):
        parser = ReplyFormat.choose(name, "think", None).parser(TOOLS, "", calls_as_json=True)
        read = read_reply(parser, calls if name == "openai" else f"<think>Hm.</think>{calls}")
        assert [(call.name, call.arguments) for call in read.calls] == [("bash", '{"command": "ls"}')]

"""Promises about text that resembles a call, and about slips that only one format knows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.tool_parsers import ParsedReply
from engine.tool_parsers.formats import ReplyFormat
from engine.tool_parsers.sound_calls import SoundCalls

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
D = "｜DSML｜"
HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'


def read(fmt: str, text: str, reasoning: str = "none", *, is_whole: bool = True) -> ParsedReply:
    """Reads the reply; asserts that it is the same whole and letter by letter."""
    replies = []
    for pieces in ([text], list(text)):
        parser = ReplyFormat.choose(fmt, reasoning, None).parser(TOOLS, "")
        reply = ParsedReply()
        assert isinstance(parser, SoundCalls)
        for piece in pieces:
            reply.add(parser.feed(piece))
        reply.add(parser.finish(is_whole=is_whole))
        replies.append(reply)
    said = [(r.reasoning, r.content, [(call.name, call.arguments) for call in r.calls]) for r in replies]
    assert said[0] == said[1]
    return replies[0]


def dsml(key: str, is_text: str, value: str, end: str = "parameter") -> str:
    parameter = f'<{D}parameter name="{key}" string="{is_text}">{value}</{D}{end}>'
    return f'<{D}invoke name="f">{parameter}</{D}invoke>'


def calls(reply: ParsedReply) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


@pytest.mark.parametrize(
    ("fmt", "block"),
    [
        ("qwen3_coder", "<tool_call></tool_call>"),
        ("hermes", "<tool_call>\n</tool_call>"),
        ("minimax_m2", "<minimax:tool_call></minimax:tool_call>"),
        ("gemma4", "<|tool_call><tool_call|>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("hunyuan_a13b", "<tool_calls>[]</tool_calls>"),
        ("lfm2", "<|tool_call_start|>[ ]<|tool_call_end|>"),
        ("granite", "<|tool_call|>[]"),
        ("apertus", "<|tools_prefix|>[]<|tools_suffix|>"),
        ("mistral", "[TOOL_CALLS] []"),
    ],
)
def test_a_block_that_holds_no_call_is_layout(fmt: str, block: str) -> None:
    reply = read(fmt, f"{block}Done.")
    assert (reply.content, reply.calls) == ("Done.", [])


@pytest.mark.parametrize("behind", ["\n</tool_call>", "\n<tool_call>\n", "\n</tool_call>\n</tool_call>"])
def test_tags_too_many_behind_a_call_are_layout(behind: str) -> None:
    reply = read("hermes", HERMES + behind)
    assert (reply.content, calls(reply)) == ("", [("f", {"a": "x"})])


@pytest.mark.parametrize(
    ("fmt", "text"),
    [
        ("hermes", HERMES.replace("<tool_call>\n", "")),
        ("hunyuan_a13b", '[{"name": "f", "arguments": {"a": "x"}}]</tool_calls>'),
        ("gemma4", 'call:f{a:<|"|>x<|"|>}<tool_call|>'),
        ("hermes", HERMES.replace("<tool_call>", "<tool_call>\n<tool_call>")),
    ],
)
def test_a_missing_or_doubled_opening_tag_costs_no_call(fmt: str, text: str) -> None:
    reply = read(fmt, text)
    assert (reply.content, calls(reply)) == ("", [("f", {"a": "x"})])


def test_an_answer_in_json_is_no_call_without_a_tag() -> None:
    text = '{"name": "f", "arguments": {"a": "x"}}'
    assert (read("hermes", text).content, read("hermes", text).calls) == (text, [])


@pytest.mark.parametrize("fence", ["```xml", "~~~", "````"])
def test_a_call_in_a_fence_is_an_example(fence: str) -> None:
    """A fenced call is shown unchanged; a call after the fence is made."""
    example = f"So:\n{fence}\n{HERMES}\n{fence.rstrip('xml')}\n"
    reply = read("hermes", example)
    assert (reply.content, reply.calls) == (example, [])
    assert calls(read("hermes", f"{example}Now:\n{HERMES}")) == [("f", {"a": "x"})]


@pytest.mark.parametrize(
    ("fmt", "head"),
    [
        ("hermes", '<tool_call>\n{"na'),
        ("hermes", "<tool_c"),
        ("qwen3_coder", "<tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f"),
        ("glm45", "<tool_call>f"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f"),
    ],
)
def test_the_head_of_a_call_that_the_length_cut_off_is_shown_to_nobody(fmt: str, head: str) -> None:
    """An unfinished call is shown only if the model itself ended there."""
    assert read(fmt, f"Sure. {head}", is_whole=False).content == "Sure. "
    assert read(fmt, f"Sure. {head}").content == f"Sure. {head}"


def test_a_short_beginning_that_may_be_text_stays() -> None:
    assert read("hermes", "a <", is_whole=False).content == "a <"


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "made"),
    [
        (
            f"<think>one could {HERMES}</think>\nThe answer is 4.",
            f"one could {HERMES}",
            "The answer is 4.",
            [],
        ),
        (f"<think>one could {HERMES}</think>", "one could ", "", [("f", {"a": "x"})]),
        (f"<think>I must\n{HERMES}\n</think>\n\nok", "I must", "ok", [("f", {"a": "x"})]),
        (f"<think>one could {HERMES} or not", f"one could {HERMES} or not", "", []),
        (f"<think>one could\n{HERMES}</think>\n{HERMES}", f"one could\n{HERMES}", "", [("f", {"a": "x"})]),
    ],
)
def test_a_call_in_the_thoughts_is_made_if_the_reply_ends_with_it(
    text: str, reasoning: str, content: str, made: list[tuple[str, Any]]
) -> None:
    """A call on its own lines at the end of reasoning is made, too; any other is a draft."""
    reply = read("hermes", text, "qwen3")
    assert (reply.reasoning.strip(), reply.content, calls(reply)) == (reasoning.strip(), content, made)


def test_the_list_that_lfm2_writes_again_calls_nothing() -> None:
    body = "[f(a='x', n=2)]"
    reply = read("lfm2", f"<|tool_call_start|>{body}<|tool_call_end|>{body}<|tool_call_end|>")
    assert (reply.content, calls(reply)) == ("", [("f", {"a": "x", "n": 2})])


@pytest.mark.parametrize(
    ("fmt", "text", "arguments"),
    [
        ("pythonic", '[f(a=r"\\d+")]', {"a": "\\d+"}),
        ("pythonic", '[f(a="one " "two"),]', {"a": "one two"}),
        ("pythonic", "[f(n=+5)]", {"n": 5}),
        ("olmo3", "<function_calls>f(n=1_000)</function_calls>", {"n": 1000}),
        ("lfm2", "<|tool_call_start|>[f(a='sed -n '1,2p' x')]<|tool_call_end|>", {"a": "sed -n '1,2p' x"}),
        ("gemma4", '<|tool_call>call:f(a: <|"|>x<|"|>, n=3)<tool_call|>', {"a": "x", "n": 3}),
        ("gemma4", "<|tool_call>call:f{a:}<tool_call|>", {"a": ""}),
        ("gemma4", '<|tool_call>call:f{a:<|"|>say <|"|>hi<|"|> now<|"|>}<tool_call|>', {"a": 'say "hi" now'}),
        ("deepseek_v32", dsml("a", "false", '"5"'), {"a": "5"}),
        ("deepseek_v32", dsml("a", "true", "x", "paramter"), {"a": "x"}),
        ("deepseek_v32", dsml("input", "false", '{"a": "x"}'), {"a": "x"}),
        ("glm45", "f\n<arg_key>a</arg_key>@x/@n</arg_key>@3/@", {"a": "x", "n": 3}),
        ("glm45", "f\na</arg_key>@x/@", {"a": "x"}),
        ("mimo", "<function=f><parameter=a>\nx\n</parameter></function>", {"a": "\nx\n"}),
        ("hermes", '{"type": "function", "function": {"name": "f", "arguments": {"a": "x"}}}', {"a": "x"}),
        (
            "hermes",
            '{"name": "f", "arguments": {"a": "x"}, "b": 1}',
            {"a": "x", "INVALID_JSON": '{"a": "x"}"b": 1'},
        ),
        (
            "hermes",
            '{"name": "f", "arguments": {"a": "x", "a": "y"}}',
            {"a": "x", "INVALID_JSON": '{"a": "x", "a": "y"}'},
        ),
        (
            "kimi_k2",
            '<|tool_call_begin|>0<|tool_call_argument_begin|>{"a": "x"}<|tool_call_end|>',
            {"a": "x"},
        ),
        ("dots", '<dots_function_call>{"name": "f", "arguments": {"n": 3}}</dots_function_call>', {"n": 3}),
        (
            "k2_horizon",
            (
                "<ifm|tool_call>f<ifm|arg_key>n</ifm|arg_key><ifm|arg_type>integer</ifm|arg_type>"
                "<ifm|arg_value>3</ifm|arg_value></ifm|tool_call>"
            ),
            {"n": 3},
        ),
    ],
)
def test_slips_of_one_format_cost_nothing(fmt: str, text: str, arguments: dict[str, Any]) -> None:
    if fmt in ("glm45", "mimo", "hermes"):
        text = f"<tool_call>{text.replace('/@', '</arg_value>').replace('@', '<arg_value>')}</tool_call>"
    reply = read(fmt, text)
    assert (reply.content, calls(reply)) == ("", [("f", arguments)])


def test_elements_of_one_name_are_a_list() -> None:
    """MiniMax M3's templates write the items of a list in several ways; no item is lost."""
    ns = "]<]minimax[>["
    inside = f"{ns}<a>{ns}<t>1{ns}</t>{ns}<t>2{ns}</t>{ns}</a>"
    reply = read("minimax_m3", f'{ns}<tool_call>{ns}<invoke name="g">{inside}{ns}</invoke>{ns}</tool_call>')
    assert calls(reply) == [("g", {"a": {"t": [1, 2]}})]


def test_messages_of_harmony_do_not_run_into_each_other() -> None:
    text = "<|channel|>commentary<|message|>I check.<|end|><|start|>assistant<|channel|>final<|message|>Done."
    assert read("openai", text, "openai").content == "I check.\n\nDone."


@pytest.mark.parametrize(
    ("fmt", "text", "reasoning", "content"),
    [
        # a text that is not a call from its first word on stays so whatever follows
        ("seed_oss", "<seed:tool_call></function><function=f></think>", None, ""),
        ("minimax_m2", '<minimax:tool_call></invoke><invoke name="f"></think>', None, ""),
        ("xlam", '<tool_call>[TOOL_CALLS]{"name": "f", "arguments": {}}</think>', None, ""),
        # a stray end of reasoning is dropped unless a quote directly precedes it
        ("hermes", "a</think>``` </think>", "a", "``` "),
        ("hermes", "a</think>`</think>`", "a", "`</think>`"),
    ],
)
def test_these_do_not_depend_on_how_they_are_cut(
    fmt: str, text: str, reasoning: str | None, content: str
) -> None:
    """Cases, found by drawing texts and cuts at random, are read alike whole and in letters."""
    expected = text.removesuffix("</think>") if reasoning is None else reasoning
    for pieces in ([text], list(text)):
        parser = ReplyFormat.choose(fmt, "think", None).parser(TOOLS, "<think>\n")
        reply = ParsedReply()
        for piece in pieces:
            reply.add(parser.feed(piece))
        reply.add(parser.finish())
        assert (reply.reasoning, reply.content, reply.calls) == (expected, content, [])


def test_a_text_without_its_last_quote_is_not_lost() -> None:
    text = '<|tool_call>call:f{n:<|"|>71001}<tool_call|>'
    assert "71001" in str(calls(read("gemma4", text)))


def test_granite_says_in_words_where_its_thoughts_end() -> None:
    text = "Here's my thought process: Foo\n\nHere is my response: Bar"
    reply = read("granite", text, "granite")
    assert (reply.reasoning, reply.content) == ("Foo", "Bar")


def test_horizon_thinks_in_the_section_that_the_prompt_has_opened() -> None:
    parser = ReplyFormat.choose("k2_horizon", "k2_horizon", None).parser(TOOLS, "<ifm|think_fast>\n")
    reply = ParsedReply()
    reply.add(parser.feed("a</ifm|think_fast>b"))
    reply.add(parser.finish())
    assert (reply.reasoning, reply.content) == ("a", "b")

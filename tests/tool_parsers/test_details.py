"""Promises of single formats: what models write besides what their templates show, and what is not a call."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.tool_parsers import read_reply
from engine.tool_parsers.formats import ReplyFormat
from tests.tool_parsers.families import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM45,
    HARMONY,
    HERMES,
    JSON,
    KIMI_K2,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    QWEN3_CODER,
    TOOLS,
    Family,
)

Calls = list[tuple[str, str]]
DSML = "｜DSML｜"
DSML_UNTYPED = (
    f'<{DSML}tool_calls><{DSML}invoke name="bash"><{DSML}parameter name="seconds">5</{DSML}parameter>'
    f"</{DSML}invoke></{DSML}tool_calls>"
)
HARMONY_PREAMBLE = (
    "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
    "to=functions.f <|constrain|>json<|message|>{}"
)


@pytest.mark.parametrize(
    ("family", "text", "content", "calls"),
    [
        # Qwen3-Coder: the outer tag is missing, or an end tag is; a value in quotes, a Python literal.
        (QWEN3_CODER, "<function=bash>\n</function>\n</tool_call>", "", [("bash", "{}")]),
        (QWEN3_CODER, "<tool_call><function=f></tool_call>", "", [("f", "{}")]),
        (
            QWEN3_CODER,
            "<tool_call><function=bash><parameter=seconds>\n5\n</parameter></function>",
            "",
            [("bash", '{"seconds": 5}')],
        ),
        (
            QWEN3_CODER,
            "<tool_call><function=bash><parameter=again>True</parameter><parameter=new>1</parameter></function>",
            "",
            [("bash", '{"again": true, "new": "1"}')],
        ),
        (
            QWEN3_CODER,
            "<tool_call><function=bash><parameter=note>None</parameter></function></tool_call> ok",
            " ok",
            [("bash", '{"note": null}')],
        ),
        (QWEN3_CODER, "<tool_call><function=f>oops", "", [("f", "oops")]),
        # GLM: no parameters, with and without a line break.
        (GLM45, "<tool_call>f</tool_call>\n<tool_call>g\n</tool_call>", "", [("f", "{}"), ("g", "{}")]),
        # Llama 3: the tag, other keys, arguments as text.
        (LLAMA3_JSON, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            LLAMA3_JSON,
            '{"type": "function", "name": "bash", "arguments": "{\\"a\\": 1}"};\n',
            "",
            [("bash", '{"a": 1}')],
        ),
        (LLAMA3_JSON, 'So:\n{"name": "bash", "parameters": {}} done', "So: done", [("bash", "{}")]),
        # Mistral: an id between name and arguments; one object without a list.
        (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
        (MISTRAL, '[TOOL_CALLS]{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        # DeepSeek: the fence is missing.
        (
            DEEPSEEK_V3,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n{}<｜tool▁call▁end｜>",
            "",
            [("f", "{}")],
        ),
        (
            DEEPSEEK_V32,
            DSML_UNTYPED,
            "",
            [("bash", '{"seconds": 5}')],
        ),
        # Python: what Llama's templates write without quotes, or with too many; tuples and escapes.
        (PYTHONIC, "[bash(command=ls -l, seconds=5)]", "", [("bash", '{"command": "ls -l", "seconds": 5}')]),
        (PYTHONIC, '[bash(seconds="5")]', "", [("bash", '{"seconds": 5}')]),
        (PYTHONIC, "[bash(command=12)]", "", [("bash", '{"command": "12"}')]),
        (PYTHONIC, "[bash(a=(1, 2,), b={'k': None},)]", "", [("bash", '{"a": [1, 2], "b": {"k": null}}')]),
        (PYTHONIC, "[bash(a='''it's\n''')]", "", [("bash", '{"a": "it\'s\\n"}')]),
        (PYTHONIC, r"""[bash(a='\x41\u00e9\'\q')]""", "", [("bash", '{"a": "Aé\'\\\\q"}')]),
        (PYTHONIC, r"""[bash(a='\ud800')]""", "", [("bash", '{"a": "\\\\ud800"}')]),
        (
            PYTHONIC,
            "<|python_start|>[f(a=1e999, b=nan)]<|python_end|>",
            "",
            [("f", '{"a": "1e999", "b": "nan"}')],
        ),
        # Harmony: the recipient in either place, an empty body, a preamble for the user.
        (
            HARMONY,
            HARMONY_PREAMBLE,
            "I look.",
            [("f", "{}")],
        ),
        (HARMONY, "<|channel|>commentary to=functions.f<|message|><|call|>", "", [("f", "{}")]),
        (HARMONY, "<|channel|>commentary to=bash<|message|>{}<|call|>", "", [("bash", "{}")]),
        (HARMONY, "<|channel|>final<|message|>Hi.<|return|>", "Hi.", []),
        (HARMONY, "plain, to=you", "plain, to=you", []),
        # Forced calls.
        (
            JSON,
            ' [{"name": "bash", "arguments": {}}, {"name": "get.time", "parameters": {}}]\n',
            "",
            [("bash", "{}"), ("get.time", "{}")],
        ),
        (JSON, '{"name": "bash", "arguments": {"a": 1}}', "", [("bash", '{"a": 1}')]),
    ],
)
def test_what_models_also_write(family: Family, text: str, content: str, calls: Calls) -> None:
    """A call that deviates from its template is still a call where the sense is plain."""
    reply = family.read(text)
    assert (reply.content, [(call.name, call.arguments) for call in reply.calls]) == (content, calls)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (QWEN3_CODER, "write <function=name> to call, or <tool_call> before it"),
        (QWEN3_CODER, "<tool_call><function=two words></function></tool_call>"),
        (GLM45, "<tool_call>two words</tool_call> and two"),
        (LLAMA3_JSON, '{"name": "Bob", "age": 5}'),
        (LLAMA3_JSON, '{"city": "Rome", "name": "f", "parameters": {}}'),
        (LLAMA3_JSON, "<|python_tag|>print(1)"),
        (MISTRAL, "[TOOL_CALLS] are [what] I make"),
        (DEEPSEEK_V3, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f"),
        (PYTHONIC, "[link](https://x) [f(a)] [g(a == b)]"),
        (PYTHONIC, "[1, 2]"),
        (PYTHONIC, "f(a=1)"),
        (JSON, '{"answer": 42}'),
        (JSON, "[]"),
        (HARMONY, "<|channel|>final without a message"),
    ],
)
def test_what_looks_like_a_call_and_is_none_stays_content(family: Family, text: str) -> None:
    """Text that only resembles a call stays content, to the last character."""
    reply = family.read(text)
    assert (reply.content, reply.calls) == (text, [])


@pytest.mark.parametrize("family", [HERMES, LLAMA3_JSON, PYTHONIC, QWEN3_CODER, MISTRAL, HARMONY])
def test_what_is_too_long_for_a_name_is_not_waited_for(family: Family) -> None:
    """An unclosed quote or tag delays the following text no longer than a name can be."""
    heads = {
        "hermes": '<tool_call>{"',
        "llama3_json": '{"name": "',
        "pythonic": "[",
        "mistral": "[TOOL_CALLS]",
    }
    text = heads.get(family.name, family.pieces[0]) + "x" * 1000
    parser = ReplyFormat.choose(family.name, "none", None).parser(TOOLS, "")
    given = "".join(getattr(delta, "text", "") for char in text for delta in parser.feed(char))
    assert text.startswith(given)
    assert len(given) > len(text) - 30


def test_the_channels_of_harmony() -> None:
    """Analysis is reasoning, calls of others' tools are not run, and without tools there are no calls."""
    text = (
        "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant<|channel|>analysis to=python"
        "<|message|> 1+1<|call|><|start|>assistant<|channel|>final<|message|>Two."
    )
    reply = HARMONY.read(text)
    assert (reply.reasoning, reply.content, reply.calls) == ("Let me think. 1+1", "Two.", [])
    parser = ReplyFormat.choose("openai", "auto", None).parser(None, "")
    call = "<|channel|>commentary to=functions.f<|message|>{}"
    assert [type(delta).__name__ for delta in parser.feed(call)] == ["ContentDelta"]


def test_harmony_goes_on_where_the_prompt_ends() -> None:
    """A message that the prompt has begun decides the channel of the reply's first words."""
    prompt_tail = "<|end|><|start|>assistant<|channel|>analysis<|message|>First,"
    parser = ReplyFormat.choose("openai", "auto", None).parser(None, prompt_tail)
    deltas = parser.feed(" think.<|end|><|start|>assistant<|channel|>final<|message|>Done.")
    assert [(type(delta).__name__, getattr(delta, "text", "")) for delta in deltas] == [
        ("ReasoningDelta", " think."),
        ("ContentDelta", "Done."),
    ]


def test_ids_are_those_that_the_template_takes_back() -> None:
    """Mistral's templates need nine letters or digits, Kimi's the id that the model wrote."""
    [call] = MISTRAL.read('[TOOL_CALLS]f{"a": 1}').calls
    assert len(call.call_id) == 9
    assert call.call_id.isalnum()
    [call] = KIMI_K2.read(KIMI_K2.render("", [("bash", {})])).calls
    assert call.call_id == "functions.bash:0"


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "number"}, "five", "five"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "nullify", "nullify"),
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "array"]}, '"x"', '"x"'),
        ({"type": "object"}, "{'a': None}", {"a": None}),
        ({"type": "array"}, "NaN", "NaN"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": True}, "true", True),
        ({"anyOf": [{"$ref": "#/$defs/number"}, {"type": "null"}]}, "1.5", 1.5),
        ({"$ref": "#/$defs/itself"}, "1", 1),
        ({}, "[1]", [1]),
        ({}, "word", "word"),
        (True, "1", 1),
    ],
)
def test_a_value_has_the_type_of_its_schema(schema: Any, text: str, value: object) -> None:
    """Text between tags becomes what the tool's schema says, or stays text where it cannot."""
    definitions = {"number": {"type": "number"}, "itself": {"$ref": "#/$defs/itself"}}
    parameters = {"type": "object", "properties": {"p": schema}, "$defs": definitions}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    parser = ReplyFormat.choose("glm45", "none", None).parser(tools, "")
    reply = read_reply(parser, f"<tool_call>f<arg_key>p</arg_key><arg_value>{text}</arg_value></tool_call>")
    assert json.loads(reply.calls[0].arguments) == {"p": value}

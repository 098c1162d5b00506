"""Templates of every kind: a turn is appended to the prompt only if the full prompt would begin the same
way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from jinja2 import Environment

from engine.api.prompt.appended_chat import STAND_IN_TOOL, HistoryShape, appended_text
from engine.api.prompt.chat_messages import Message, normalize
from engine.errors import RequestError

END = "<|im_end|>"
PLAIN = """
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and m.reasoning %}{{ '<think>' + m.reasoning + '</think>' }}{% endif %}
{{- m.content }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
LATER_QUESTIONS_STRIP = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and m.reasoning and loop.index0 > ns.last -%}
{{ '<think>' + m.reasoning + '</think>' }}{% endif %}
{{- m.content }}{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
HISTORY_STRIPS = PLAIN.replace("and m.reasoning %}", "and m.reasoning and loop.last %}")
NO_CALLS = PLAIN.replace("in m.tool_calls or []", "in []")
TOOLS_BEFORE_THE_LAST_QUESTION = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if loop.index0 == ns.last and tools %}{{ '[TOOLS]' }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
SYSTEM_IN_THE_LAST_QUESTION = """
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for m in messages if m.role != 'system' %}
{{- '<|im_start|>' + m.role + '\n' + (system if loop.last else '') + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
OTHER_END = PLAIN.replace("{{- '<|im_end|>\n' }}", "{{- '<|done|>' if loop.last else '<|end|>' }}")
RESULTS_TOGETHER = """
{%- for m in messages %}{% if m.role != 'tool' or loop.previtem.role != 'tool' %}
{{- '<|im_start|>' + m.role }}{% endif %}{{ '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}
{%- if m.role != 'tool' or loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
ALTERNATING = """
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ 1 / 0 }}{% endif %}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
EMPTY_THOUGHT = PLAIN.replace("assistant\n' }}", "assistant\n<think></think>' }}")
CALLS_BY_NAME = """
{%- for m in messages %}{{ '<|im_start|>' + m.role }}
{%- for earlier in messages[:loop.index0] %}{% for c in earlier.tool_calls or [] %}
{%- if m.tool_call_id == c.id %}{{ ' of ' + c.function.name }}{% endif %}{% endfor %}{% endfor %}
{{- '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
TEMPLATES = {
    "calls by name": CALLS_BY_NAME,
    "plain": PLAIN,
    "later questions strip": LATER_QUESTIONS_STRIP,
    "history strips": HISTORY_STRIPS,
    "no calls": NO_CALLS,
    "tools before the last question": TOOLS_BEFORE_THE_LAST_QUESTION,
    "system in the last question": SYSTEM_IN_THE_LAST_QUESTION,
    "another end": OTHER_END,
    "results together": RESULTS_TOGETHER,
    "alternating": ALTERNATING,
    "empty thought": EMPTY_THOUGHT,
}


def renderer(template: str, *, has_tools: bool) -> Any:
    compiled = Environment(trim_blocks=False).from_string(template)

    def render(messages: Sequence[Message], with_reply: bool) -> str:
        tools = [STAND_IN_TOOL] if has_tools else None
        try:
            return compiled.render(messages=messages, tools=tools, add_generation_prompt=with_reply)
        except Exception as error:
            raise RequestError(str(error)) from error

    return render


def reply(text: str, reasoning: str = "", *calls: str) -> Message:
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [
            {"type": "function", "id": name, "function": {"name": name, "arguments": "{}"}} for name in calls
        ]
    return message


def tool(text: str, call_id: str = "look") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


HISTORIES: list[list[Message]] = [
    [user("What?")],
    [{"role": "system", "content": "Short."}, user("What?")],
    [user("What?"), reply("This.", "Hm."), user("And?")],
    [user("What?"), reply("", "Hm.", "scan"), tool("a.py", "scan")],
    [
        user("What?"),
        reply("See.", "", "scan", "read"),
        tool("a", "scan"),
        tool("b", "read"),
        reply("So.", "Ah."),
        user("Then?"),
    ],
]
REPLIES = [
    reply("Done."),
    reply("Done.", "I think so."),
    reply("", "I look.", "look"),
    reply("Well.", "", "look", "find"),
]
FOLLOWING: list[list[Message]] = [
    [user("More?")],
    [tool("c.py")],
    [tool("c"), tool("d", "find")],
    [tool("c"), user("So?")],
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_appended_prompt_is_the_whole_one(name: str) -> None:
    """For any history, reply and following messages: the earlier prompt, the reply as the template writes it
    and the appended text together equal the prompt rendered from all messages."""
    num_appended = 0
    for history, answer, following in product(HISTORIES, REPLIES, FOLLOWING):
        whole = normalize([*history, answer, *following])
        has_tools = any(message["role"] == "tool" for message in whole) or bool(answer.get("tool_calls"))
        shape = HistoryShape(
            has_system=history[0]["role"] == "system",
            has_tools=has_tools,
            has_reasoning=any(message.get("reasoning") for message in history),
        )
        render = renderer(TEMPLATES[name], has_tools=has_tools)
        text = appended_text(*_split(whole, len(history)), END, shape, render)
        if text is None:
            continue
        num_appended += 1
        asked = render(whole[: len(history)], True)
        rendered = render(whole, True)
        assert rendered.startswith(asked), (history, answer, following)
        assert rendered.endswith(END + text), (history, answer, following)
        said = rendered[len(asked) : len(rendered) - len(END + text)]
        assert END not in said, "the reply alone stands between"
        assert answer["content"] in said
    assert (num_appended == 0) == (name in NEVER), num_appended


def _split(whole: list[Message], place: int) -> tuple[Message, list[Message]]:
    return whole[place], whole[place + 1 :]


NEVER = {"another end", "empty thought"}
"""Templates for which no prompt begins with the previous one."""


def test_the_plain_one_always_appends() -> None:
    """With a template that only appends, no turn is rendered in full."""
    render = renderer(PLAIN, has_tools=True)
    for answer, following in product(REPLIES, FOLLOWING):
        calls = {call["id"] for call in answer.get("tool_calls", ())}
        if not {message.get("tool_call_id") for message in following} <= {None, *calls}:
            continue
        whole = normalize([answer, *following])
        assert appended_text(*_split(whole, 0), END, HistoryShape(True, True, True), render) is not None


@pytest.mark.parametrize(
    "messages",
    [
        [reply("Done.")],
        [user("Done?"), user("More?")],
        [reply("Done."), {"role": "system", "content": "Now be long."}],
        [reply("Done."), reply("Done again.")],
        [reply("Done.", "", "look"), tool("a.py", "find")],
    ],
    ids=["nothing follows", "no reply", "a system message", "two replies", "a result of another call"],
)
def test_other_messages_are_rendered(messages: list[Message]) -> None:
    """Anything but a reply followed by messages of users and tools is rendered in full."""
    whole = normalize(messages)
    render = renderer(PLAIN, has_tools=False)
    assert appended_text(*_split(whole, 0), END, HistoryShape(False, False, False), render) is None


def test_the_templates_differ() -> None:
    """All templates differ, and two of them contain what their names say."""
    assert len(set(TEMPLATES.values())) == len(TEMPLATES)
    assert "<|done|>" in OTHER_END
    assert "<think></think>" in EMPTY_THOUGHT

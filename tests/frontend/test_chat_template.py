"""Chat templates, rendered by us and by transformers: the same text, or the same error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer
from eval.agent_model import folder

CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "bash", "arguments": {"command": "ls -l", "n": 1}},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief; say <b> & 'so'."},
    {"role": "user", "content": "List the files."},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL], "reasoning": "first look", "name": None},
    {"role": "tool", "tool_call_id": "c1", "content": "a.txt\n\tb.txt"},
    {"role": "assistant", "content": "<think>hm</think> Two.", "thinking": "", "items": [1, 2.5, True, None]},
    {"role": "user", "content": " Trailing space "},
]
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}

TEMPLATES = {
    "fields": (
        "{% for m in messages %}{{ m.role }}={{ m.missing }}{{ m['content'] }}{{ m.get('name', '-') }}\n"
        "{% endfor %}"
    ),
    "a field named like a method": (
        "{{ messages[4]['items'] }}{{ messages[4].items() | list }}{{ messages[4].items is callable }}"
    ),
    "thoughts": (
        "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }}|{{ m.reasoning }}\n{% endfor %}"
    ),
    "what is defined": (
        "{% for m in messages %}{{ m.name is defined }}{{ m.role is defined }}{% endfor %}{{ tools is none }}"
    ),
    "loops": (
        "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
        "{{ loop.revindex }}{{ loop.previtem.role }}{{ loop.nextitem.role }}{{ loop.cycle('a', 'b') }}"
        "{{ loop.changed(m.role) }}{{ loop.depth }}{{ loop.nothing }}"
        "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}"
    ),
    "namespace": (
        "{% set ns = namespace(last=-1, n=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' %}"
        "{% set ns.n = ns.n + 1 %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{{ ns.n }} {{ ns.last }}"
    ),
    "json": (
        "{{ tools | tojson(indent=2) }}"
        "{{ messages[2].tool_calls | map(attribute='function') | list | tojson }}"
    ),
    "strings": (
        "{{ messages[4].content.split('</think>')[-1].lstrip() }}{{ messages[5].content | trim }}"
        "{{ '{}'.format(1) }}"
    ),
    "macro": "{% macro say(m) %}[{{ m.role }}: {{ m.content }}]{% endmacro %}{{ say(messages[1]) }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "special tokens": "{{ eos_token }}{{ mood }}{{ add_generation_prompt }}{{ documents is none }}",
    "refusal": "{{ raise_exception('roles must alternate') }}",
    "undefined": "{{ messages[0].nothing.more }}",
    "private": "{{ messages[0].__class__.__mro__ }}",
    "private of a loop": "{% for m in messages %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "changing a message": "{{ messages[0].update({'role': 'x'}) }}",
    "changing the list": "{{ messages.append(1) }}",
    "format string": "{{ '{0.__class__}'.format(messages) }}",
    "broken": "{% for %}",
    "tiny models": Path(__file__, "../../../engine/worker/chat_template.jinja").resolve().read_text(),
    "the model in the box": (folder() / "chat_template.jinja").read_text(),
}


def outcome(render: Any, *args: Any, **kwargs: Any) -> str | tuple[str, str]:
    """The text, or what was wrong."""
    try:
        return str(render(*args, **kwargs))
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]])
def test_templates_render_as_in_transformers(
    tokenizer: Tokenizer, name: str, tools: list[Any] | None
) -> None:
    """Whatever a template does with messages, tools and its own arguments, and whatever it must not do."""
    options: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False}
    expected = outcome(
        tokenizer.hf.apply_chat_template,
        CONVERSATION,
        tools=tools,
        chat_template=TEMPLATES[name],
        tokenize=False,
        mood="glad",
        **options,
    )
    template = ChatTemplate(tokenizer.hf)
    for _ in range(2):
        rendered = outcome(
            template.render, CONVERSATION, tools, TEMPLATES[name], extra={"mood": "glad"}, **options
        )
        assert rendered == expected


def test_a_message_that_is_not_finished_is_continued_as_in_transformers(tokenizer: Tokenizer) -> None:
    """The reply that is to be continued stays open."""
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [*CONVERSATION, {"role": "assistant", "content": "So there are"}]
    expected = tokenizer.hf.apply_chat_template(messages, tokenize=False, **options)
    text = ChatTemplate(tokenizer.hf).render(messages, None, None, extra={}, **options)
    assert text == expected
    assert text.endswith("So there are")


@dataclass
class Picture:
    """What a template must not reach into."""

    path: str = "secret"

    def write(self) -> str:
        """Would do harm."""
        return "harm"


def test_what_is_not_json_is_made_harmless_first(tokenizer: Tokenizer) -> None:
    """Callers of ``LLM.chat`` may give any object: a template sees none of its methods."""
    messages = [{"role": "user", "content": "x", "picture": Picture()}]
    text = ChatTemplate(tokenizer.hf).render(
        messages,
        None,
        "{{ messages[0].picture.write is defined }} {{ messages[0].picture.path }}",
        add_generation_prompt=True,
        continue_final_message=False,
        extra={},
    )
    assert text == "False secret"

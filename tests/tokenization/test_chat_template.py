"""Chat templates, rendered by us and by transformers: the same text, or the same error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.errors import RequestError
from engine.tokenization.chat_template import ChatTemplate
from engine.tokenization.content_format import ContentFormat
from engine.tokenization.tokenizer import Tokenizer
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
    "tiny models": Path(__file__, "../../../engine/worker/loading/chat_template.jinja").resolve().read_text(),
    "the model in the box": (folder() / "chat_template.jinja").read_text(),
}


def outcome(render: Any, *args: Any, **kwargs: Any) -> str | tuple[str, str]:
    """Returns the text, or the error's type and message."""
    try:
        return str(render(*args, **kwargs))
    except Exception as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [TOOL, TOOL]])
def test_templates_render_as_in_transformers(
    tokenizer: Tokenizer, name: str, tools: list[Any] | None
) -> None:
    """Rendering equals transformers' for messages, tools, extra arguments, and forbidden operations."""
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
    """The reply to continue stays open."""
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [*CONVERSATION, {"role": "assistant", "content": "So there are"}]
    expected = tokenizer.hf.apply_chat_template(messages, tokenize=False, **options)
    text = ChatTemplate(tokenizer.hf).render(messages, None, None, extra={}, **options)
    assert text == expected
    assert text.endswith("So there are")


OPEN = {
    "keeps blanks": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}",
    "strips": "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}",
    "parts": "{% for m in messages %}<{{ m.role }}>{% for p in m['content'] %}{{ p['text'] }}{% endfor %}</>"
    "{% endfor %}",
    "of the tokenizer": None,
}


@pytest.mark.parametrize("template", OPEN.values(), ids=OPEN)
@pytest.mark.parametrize("text", ["So there are", " there ", "ends in blanks \n", "", "é </>"])
def test_what_a_template_writes_behind_an_open_message_is_cut_off(
    tokenizer: Tokenizer, template: str | None, text: str
) -> None:
    shaped: Any = [{"type": "text", "text": text}] if template is not None and "p['" in template else text
    messages = [{"role": "user", "content": shaped}, {"role": "assistant", "content": shaped}]
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    expected = tokenizer.hf.apply_chat_template(
        messages, tokenize=False, chat_template=template, documents=[{"text": "d"}], **options
    )
    rendered = ChatTemplate(tokenizer.hf).render(
        messages, None, template, extra={"documents": [{"text": "d"}]}, **options
    )
    assert rendered == expected


@pytest.mark.parametrize(
    ("template", "content"),
    [("{{ messages[0].content }}", "left out"), (None, None), (None, [{"type": "image"}])],
)
def test_an_open_message_that_is_not_shown_is_refused(
    tokenizer: Tokenizer, template: str | None, content: Any
) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    with pytest.raises(ValueError, match=r"to continue"):
        ChatTemplate(tokenizer.hf).render(
            messages, None, template, add_generation_prompt=False, continue_final_message=True, extra={}
        )


def test_an_open_message_is_rendered_in_bounds(tokenizer: Tokenizer) -> None:
    """Every way to render, also for an open message, limits a template's loops."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
    messages = [{"role": "user", "content": "x"}]
    documents: dict[str, Any] = {"documents": []}
    ways: list[dict[str, Any]] = [{"continue_final_message": True}, {"chat_template_kwargs": documents}]
    for more in ways:
        with pytest.raises(RequestError, match="iterations"):
            tokenizer.chat_text(messages, None, endless, False, **more)
    with pytest.raises(RequestError, match="must not set 'padding'"):
        tokenizer.chat_text(messages, None, endless, chat_template_kwargs={"padding": True})


@dataclass
class Picture:
    """An object that a template must not reach into."""

    path: str = "secret"

    def write(self) -> str:
        """Would do harm."""
        return "harm"


def test_what_is_not_json_is_made_harmless_first(tokenizer: Tokenizer) -> None:
    """Callers of ``LLM.chat`` may pass any object: a template sees its fields, not its methods."""
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


LOOP = "{% for m in messages %}<{{ m.role }}>"
END = "{% endfor %}"
SAY = "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}"
PARTS = {
    "loop": LOOP + SAY + END,
    "name": LOOP
    + "{% set c = m.content %}{% for p in c | selectattr('type', 'eq', 'text') %}{{ p.text }}{% endfor %}"
    + END,
    "slice": "{% set rest = messages[0:] %}" + LOOP.replace("messages", "rest") + SAY + END,
    "macro": "{% macro say(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
    + LOOP
    + "{{ say(m.content) }}"
    + END,
    "filters": LOOP + "{{ m.content | map(attribute='text') | join('') }}{% endfor %}",
    "strict": "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + LOOP
    + "{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
}
"""Templates that accept parts only."""
EITHER = LOOP + "{% if m.content is string %}{{ m.content | trim }}{% else %}" + SAY + "{% endif %}" + END
IN_PARTS: list[dict[str, Any]] = [
    {"role": "system", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": " brief."}]},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
]


@pytest.mark.parametrize("name", PARTS)
def test_a_template_for_parts_gets_parts(tokenizer: Tokenizer, name: str) -> None:
    """A template for parts gets them as the client sent them, and a text as one part."""
    template = PARTS[name]
    expected = tokenizer.hf.apply_chat_template(IN_PARTS, chat_template=template, tokenize=False)
    assert tokenizer.chat_text(IN_PARTS, chat_template=template) == expected == "<system>Be brief.<user>ab"
    texts = [{"role": "system", "content": "Be"}, {"role": "user", "content": "hello"}]
    assert tokenizer.chat_text(texts, chat_template=template) == "<system>Be<user>hello"


def test_a_template_for_both_gets_what_the_client_sent(tokenizer: Tokenizer) -> None:
    """Each message keeps its form, as in transformers."""
    for messages in (IN_PARTS, [{"role": "user", "content": " hello "}]):
        expected = tokenizer.hf.apply_chat_template(messages, chat_template=EITHER, tokenize=False)
        assert tokenizer.chat_text(messages, chat_template=EITHER) == expected


@pytest.mark.parametrize("name", ["fields", "strings", "tiny models", "the model in the box"])
def test_a_template_for_texts_gets_texts(tokenizer: Tokenizer, name: str) -> None:
    """Parts are joined into the text that such a template expects."""
    template = TEMPLATES[name]
    filled = [*CONVERSATION[:-1], {"role": "user", "content": [{"type": "text", "text": " Trailing space "}]}]
    assert tokenizer.chat_text(filled, chat_template=template) == tokenizer.chat_text(
        CONVERSATION, chat_template=template
    )


def test_the_form_can_be_set(tokenizer: Tokenizer) -> None:
    """The option decides, whatever the template looks like."""
    shown = "{% for m in messages %}{{ m.content }}{% endfor %}"
    texts, parts = (
        tokenizer.chat_text(
            [{"role": "user", "content": "hi"}], chat_template=shown, content_format=ContentFormat(name)
        )
        for name in ("string", "openai")
    )
    assert texts == "hi"
    assert parts == "[{'type': 'text', 'text': 'hi'}]"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}", "5,000,000"),
        (
            "{% for a in messages[0].content * 999 %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "iterations",
        ),
        ("{{ 'a' * 1000000000 }}", "repeated"),
        ("{{ 1000000000 * ['a'] }}", "repeated"),
        ("{{ 9 ** 9999999 }}", "power"),
    ],
)
def test_a_template_that_never_ends_is_refused(template: str, told: str, tokenizer: Tokenizer) -> None:
    """An endless template is stopped, as no one could end its thread. The next one is rendered as usual."""
    messages = [{"role": "user", "content": "some words " * 9}]
    with pytest.raises(Exception, match=told):
        tokenizer.chat_text(messages, chat_template=template, add_generation_prompt=False)
    plain = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"
    said = tokenizer.chat_text(messages, chat_template=plain, add_generation_prompt=False)
    assert said == "1" + "some words " * 9

"""Chat templates that expect content parts, over HTTP: no text is lost, in any API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.server import Server, running_server

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)
TEXT = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]


def prompt_of(http: httpx.Client, **body: Any) -> str:
    """Returns the rendered prompt of a conversation as text."""
    answer = http.post("/tokenize", json={"add_generation_prompt": False, **body})
    assert answer.status_code == 200, answer.text
    text = http.post("/detokenize", json={"tokens": answer.json()["tokens"]}).json()["prompt"]
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("content", "shown"), [(TEXT, "one two"), ("one text", "one text"), ([TEXT[0]], "one "), ("", "")]
)
def test_parts_reach_a_template_that_wants_them(http: httpx.Client, content: Any, shown: str) -> None:
    """Such a template gets contents as parts; a plain text becomes one part."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    text = prompt_of(http, messages=messages, chat_template=TEMPLATE)
    assert text == f"<system>Be brief.<user>{shown}"


@pytest.fixture(scope="module")
def in_parts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose chat template expects content parts."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    flags = ("--chat-template", str(path), "--num-gpu-blocks-override", "400")
    with running_server(model, *flags) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello there"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/responses", {"input": "hello there"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}),
    ],
)
def test_every_dialect_is_told_to_such_a_template(in_parts: Server, path: str, body: dict[str, Any]) -> None:
    """In every API the prompt contains the text: it is longer than that of a one-letter message."""
    with httpx.Client(base_url=in_parts.url, timeout=30) as http:
        answer = http.post(path, json={"model": "tiny", **body}).json()
        empty = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    usage = answer["usage"]
    assert usage.get("prompt_tokens", usage.get("input_tokens")) > empty["count"]

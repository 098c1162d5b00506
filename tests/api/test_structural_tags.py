"""Structural tags over HTTP: both of V1's request fields, and both forms of tags."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
DIGITS = {"type": "regex", "pattern": "[0-9]{2}"}
TAGGED: dict[str, Any] = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<n>", "content": DIGITS, "end": "</n>"},
}
OLDER: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<n>", "schema": {"enum": [1, 2]}, "end": "</n>"}],
    "triggers": ["<n"],
}
TOOLS = [{"type": "function", "function": {"name": "n", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": TAGGED}, "<n>[0-9]{2}</n>"),
        ({"structured_outputs": {"structural_tag": TAGGED}}, "<n>[0-9]{2}</n>"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGGED)}}, "<n>[0-9]{2}</n>"),
        ({"response_format": OLDER}, "(?s)((?!<n).)*(<n(>([12](</n>.*)?)?)?)?"),
    ],
)
def test_structural_tags_are_followed(
    http: httpx.Client, path: str, fields: dict[str, Any], pattern: str
) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Say a number."}], "tools": TOOLS}
    body = {**(asked if path == CHAT else {"prompt": "A number: "}), **fields, "max_tokens": 60}
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert re.fullmatch(pattern, text)


def test_a_stream_of_structural_tags_is_the_whole_answer(http: httpx.Client) -> None:
    body = {"prompt": "A number: ", "response_format": TAGGED, "seed": 5, "max_tokens": 60}
    whole = http.post(COMPLETIONS, json=body).json()["choices"][0]["text"]
    lines = http.post(COMPLETIONS, json={**body, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == whole

"""A model family as the tests know it, and the calls that each family must write."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Environment

from engine.tool_parsers import ParsedReply, read_reply
from engine.tool_parsers.formats import ReplyFormat

Call = tuple[str, dict[str, Any]]

PROPERTIES = {
    "command": {"type": "string"},
    "seconds": {"type": "integer"},
    "share": {"type": "number"},
    "again": {"type": "boolean"},
    "names": {"type": "array", "items": {"type": "string"}},
    "options": {"type": "object"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}},
    }
    for name in ("bash", "str_replace-editor", "get.time")
]

CALLS: list[Call] = [
    ("bash", {"command": "echo \"é\\n{}\" | sed 's/</&/'\n\ttail", "seconds": 30, "again": True}),
    ("str_replace-editor", {"names": ["a", "b]"], "options": {"k": None, "deep": [1]}, "share": 0.5}),
    ("get.time", {}),
    ("bash", {"command": "", "note": None, "again": False}),
    ("bash", {"command": "12", "note": "null and void"}),
]


@dataclass(frozen=True)
class Family:
    """One format: its template's excerpt, and texts that its parser must examine closely."""

    name: str
    template: str
    pieces: list[str]
    stop: str = ""
    """The end of a reply in the template, which is not part of its text."""
    calls: list[Call] = field(default_factory=lambda: CALLS)
    messages: bool = False
    """Whether a reply is several messages, of which some are reasoning."""
    guesses: bool = False
    """Whether types inside objects and lists are guesses, because only schemas state them."""

    def render(self, content: str, calls: list[Call]) -> str:
        environment = Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        named = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return (
            environment.from_string(self.template)
            .render(content=content, calls=named)
            .removesuffix(self.stop)
        )

    def read(self, text: str) -> ParsedReply:
        return read_reply(ReplyFormat.choose(self.name, "none", None).parser(TOOLS, ""), text)

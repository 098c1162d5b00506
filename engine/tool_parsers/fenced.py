"""Finds the one command that a text agent will run: a response with exactly one fenced bash block.

The engine uses it to know which tool runs next; the response is not changed.
"""

from __future__ import annotations

import json
import re

from engine.records.messages import ToolCall

_BLOCK = re.compile(r"^```(?:bash|mswea_bash_command)[ \t]*\r?\n(.*?)\r?\n```", re.DOTALL | re.MULTILINE)


def read_fenced_command(text: str) -> ToolCall | None:
    """The command of the only bash block; None if there is none, or several (such agents refuse these)."""
    commands: list[str] = _BLOCK.findall(text)
    if len(commands) != 1 or not commands[0].strip():
        return None
    return ToolCall("bash", json.dumps({"command": commands[0].strip()}, ensure_ascii=False))

"""Parses a response that is only the text argument of one tool: its call is known before the first word."""

from __future__ import annotations

import json

from engine.tool_parsers.base import ReplyDelta, ToolCallDelta, new_call_id


class FreeInputParser:
    """Parses one response: all of it is the one argument of the tool."""

    def __init__(self, function: str, parameter: str) -> None:
        self._function = function
        self._parameter = parameter
        self._has_begun = False

    def feed(self, text: str) -> list[ReplyDelta]:
        if not text:
            return []
        begin = self._begin()
        return [*begin, ToolCallDelta(0, arguments=json.dumps(text, ensure_ascii=False)[1:-1])]

    def finish(self) -> list[ReplyDelta]:
        return [ToolCallDelta(0, arguments='"}')] if self._has_begun else []

    def _begin(self) -> list[ReplyDelta]:
        if self._has_begun:
            return []
        self._has_begun = True
        head = f'{{{json.dumps(self._parameter)}: "'
        return [ToolCallDelta(0, new_call_id(), self._function, head)]

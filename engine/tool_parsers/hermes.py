"""Hermes and Qwen tool calls: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

A call becomes certain when its head (``{"name": "f", "arguments": {``) has been read; from then on
the argument text is passed on as it comes. Text that turns out before that point not to be a call
is content, to the last character. One pair of tags may hold several calls, as a list or one after
the other.
"""

from __future__ import annotations

from engine.tool_parsers.reader import Tag
from engine.tool_parsers.tagged.json_between import JsonBetweenTags

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesToolParser(JsonBetweenTags):
    """Parses one response; see the module's text for what is a call."""

    opening = Tag(OPEN, line_breaks=1)
    closing = Tag(CLOSE)
    raw_end = Tag(OPEN, CLOSE)

"""Hermes and Qwen tool calls: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.

A call becomes certain when its head (``{"name": "f", "arguments": {``) has been read; from then on the
argument text is passed on as it arrives. Text that turns out not to be a call before that point is content,
to the last character. One pair of tags may hold several calls, as a list or in sequence.
"""

from __future__ import annotations

from engine.tool_parsers.reader import Tag
from engine.tool_parsers.tagged.json_between import JsonBetweenTags

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesToolParser(JsonBetweenTags):
    """Parses one response; the module's docstring defines a call."""

    opening = Tag(OPEN, line_breaks=1)
    closing = Tag(CLOSE)
    raw_end = Tag(OPEN, CLOSE)

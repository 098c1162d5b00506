"""Parsers of tool calls in generated text: take text, return content and calls. They do not know the engine
or HTTP."""

from __future__ import annotations

from engine.tool_parsers.base import (
    ContentDelta,
    ParsedReply,
    ReasoningDelta,
    ReplyDelta,
    ReplyParser,
    ToolCallDelta,
    read_reply,
)
from engine.tool_parsers.fenced import read_fenced_command
from engine.tool_parsers.hermes import HermesToolParser

__all__ = [
    "ContentDelta",
    "HermesToolParser",
    "ParsedReply",
    "ReasoningDelta",
    "ReplyDelta",
    "ReplyParser",
    "ToolCallDelta",
    "read_fenced_command",
    "read_reply",
]

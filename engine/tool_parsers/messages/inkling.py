"""The messages of Inkling: a token states what a message contains, and a call is one JSON object.

``<|message_model|><|content_thinking|>...<|end_message|>`` is reasoning, ``<|content_text|>`` begins an
answer, ``<|content_invoke_tool_json|>{"name": "f", "args": {...}}`` is a call. The prompt ends after
``<|message_model|>``, and ``<|content_model_end_sampling|>`` may replace the last end.
"""

from __future__ import annotations

import re

from engine.tool_parsers.messages.message_reader import MessageReader
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged.json_between import JsonBetweenTags

START = "<|message_model|>"
THINKING = "<|content_thinking|>"
ANSWER = "<|content_text|>"
CALL = "<|content_invoke_tool_json|>"
ENDS = ("<|end_message|>", "<|content_model_end_sampling|>")


class InklingCall(JsonBetweenTags):
    """Parses one message of a call."""

    opening = Tag(CALL)
    raw_end = Tag(*ENDS)


class InklingParser(MessageReader):
    """Parses one response, including the reasoning."""

    opening = Tag(START, THINKING, ANSWER, CALL)
    start = START
    heads_end = (THINKING, ANSWER, CALL)
    head_stops = Tag(*heads_end, *ENDS, START)
    message_end = Tag(*ENDS, START, *heads_end)
    next_heads = (START, *heads_end)
    known_in_head = re.compile("|".join(map(re.escape, (START, *heads_end))))

    def _read_message(self, head: str, unknown: str) -> Steps[None]:
        if head.endswith(THINKING):
            yield from self._pass_reasoning(unknown)
        elif head.endswith(ANSWER) or not self._reads_calls:
            yield from self._pass_answer(unknown)
        else:
            yield from self._pass_calls(InklingCall(self._offered), f"{unknown}{CALL}")

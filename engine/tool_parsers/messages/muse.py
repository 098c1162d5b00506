"""The messages of Muse: a head names the recipient of a message, and calls are elements.

``<|start|>assistant to=self<|message|>`` begins reasoning, ``to=user`` the answer, ``to=commentary`` text
that the user sees in the meantime, and any other recipient a message of calls, such as
``<atem:function_calls><atem:invoke name="f"><atem:parameter
name="k">v</atem:parameter></atem:invoke></atem:function_calls>``. ``<|eom|>`` ends a message, ``<|eot|>`` the
response. Elements in other messages are text.
"""

from __future__ import annotations

import re

from engine.tool_parsers.messages.message_reader import MessageReader
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged.invoke import InvokeTags, InvokeToolParser

START = "<|start|>assistant"
MESSAGE = "<|message|>"
ANSWER = "to=user" + MESSAGE
"""The text that begins the answer."""

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_SELF = "self"
_USER = ("user", "commentary")


class AtemToolParser(InvokeToolParser):
    """Parses one message of calls."""

    tags = InvokeTags(
        sections=("<atem:function_calls>",),
        section_ends=("</atem:function_calls>",),
        invoke='<atem:invoke name="',
        invoke_end="</atem:invoke>",
        parameter='<atem:parameter name="',
        parameter_end="</atem:parameter>",
        mark="</atem:",
    )


class MuseParser(MessageReader):
    """Parses one response, including the reasoning."""

    opening = Tag(START, MESSAGE)
    start = START
    head_inside = Tag(" to=", "to=")
    heads_end = (MESSAGE,)
    head_stops = Tag(MESSAGE, "<|eom|>", "<|eot|>", "<|start|>")
    message_end = Tag("<|eom|>", "<|eot|>", "<|start|>")
    next_heads = ("<|start|>",)
    known_in_head = re.compile(r"<\|start\|>assistant|\bto=[^\s<]+|<\|message\|>")

    def _read_message(self, head: str, unknown: str) -> Steps[None]:
        found = _RECIPIENT.search(head)
        if found is None or found.group(1) == _SELF:
            yield from self._pass_reasoning(unknown)
        elif found.group(1) in _USER or not self._reads_calls:
            yield from self._pass_answer(unknown)
        else:
            yield from self._pass_calls(AtemToolParser(self._offered), unknown)

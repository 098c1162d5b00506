"""The messages of gpt-oss ("harmony"): reasoning, calls and answer are in channels of one response.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>``: a message's header states its kind. The prompt ends after
``<|start|>assistant``.
"""

from __future__ import annotations

import re

from engine.tool_parsers.messages.message_reader import MessageReader
from engine.tool_parsers.reader import Steps, Tag

START = "<|start|>assistant"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"

FINAL = CHANNEL + "final" + MESSAGE
"""The text that begins the answer; everything before it is reasoning, or a message to tools."""
RECIPIENT = "to=functions"
"""Prefix of the recipient of a message that is a call of a function."""

_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."


class HarmonyParser(MessageReader):
    """Parses one response, including the reasoning."""

    opening = Tag(START, CHANNEL, MESSAGE)
    start = START
    head_inside = Tag(" to=", "to=")
    heads_end = (MESSAGE,)
    head_stops = Tag(MESSAGE, "<|end|>", "<|call|>", "<|return|>", "<|start|>")
    message_end = Tag("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)
    next_heads = ("<|start|>", CHANNEL)
    known_in_head = re.compile(
        r"<\|start\|>assistant|<\|channel\|>\s*\w*|\bto=[^\s<]+|<\|constrain\|>\s*\w*|<\|message\|>"
        r"|\b(?:json|code)\b"
    )
    _has_arguments = False

    def _read_message(self, head: str, unknown: str) -> Steps[None]:
        function = self._called(head)
        if function is not None:
            yield from self._pass_call(function, unknown)
        elif _found(_CHANNEL, head) == "analysis" or self._goes_to_nobody(head):
            yield from self._pass_reasoning(unknown)
        else:
            yield from self._pass_answer(unknown)

    def _called(self, head: str) -> str | None:
        """The function to which a message is addressed, if the client offers it."""
        recipient = _found(_RECIPIENT, head)
        if not self._reads_calls or recipient is None:
            return None
        function = recipient.removeprefix(_FUNCTIONS)
        return function if recipient != function or function in self._tools else None

    def _goes_to_nobody(self, head: str) -> bool:
        """Whether a message calls a function that the client does not offer: then it is not shown."""
        return self._reads_calls and _found(_RECIPIENT, head) is not None

    def _pass_call(self, function: str, unknown: str) -> Steps[None]:
        self._begin_call(function)
        self._give_stray(unknown)
        self._has_arguments = False
        ended = yield from self._pass_message(self._give_arguments)
        # The token that ends a call also ends the response, and is then not part of its text.
        self.is_cut = self._has_arguments and not ended

    def _give_arguments(self, text: str) -> None:
        self._has_arguments = self._has_arguments or bool(text.strip())
        super()._give_arguments(text)


def _found(pattern: re.Pattern[str], head: str) -> str | None:
    found = pattern.search(head)
    return found.group(1) if found else None

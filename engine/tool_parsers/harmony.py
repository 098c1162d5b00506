"""The messages of gpt-oss ("harmony"): reasoning, calls and answer come in channels of one response.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{...}<|call|>``: a message's header says what it is. The prompt ends
after ``<|start|>assistant``, so the first header begins in its middle.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from engine.tool_parsers.base import ReasoningDelta
from engine.tool_parsers.parameters import Tool
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged_reader import TaggedReader

START = "<|start|>assistant"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"

FINAL = CHANNEL + "final" + MESSAGE
"""Begins the answer: what comes before it is reasoning, or a message to tools."""

_HEAD_INSIDE = Tag(" to=", "to=")
_HEAD_END = Tag(MESSAGE, "<|end|>", "<|call|>", "<|return|>", "<|start|>")
_MESSAGE_END = Tag("<|end|>", "<|call|>", "<|return|>", "<|start|>", CHANNEL)
_NEXT_HEADS = ("<|start|>", CHANNEL)

_CHANNEL = re.compile(r"<\|channel\|>\s*([^\s<]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_KNOWN_IN_HEAD = re.compile(
    r"<\|start\|>assistant|<\|channel\|>\s*\w*|\bto=[^\s<]+|<\|constrain\|>\s*\w*|<\|message\|>|\b(?:json|code)\b"
)
"""What the header of a call says."""


class HarmonyParser(TaggedReader):
    """Parses one response, including the reasoning."""

    opening = Tag(START, CHANNEL, MESSAGE)

    def __init__(self, tools: Sequence[Tool], prompt_tail: str = "") -> None:
        super().__init__(tools)
        self._reads_calls = bool(tools)
        self._has_arguments = False
        self._has_answered = False
        self._separates = False
        """Whether the next text for the user begins another message."""
        begun = prompt_tail.rpartition(START)[2] if START in prompt_tail else ""
        if begun:  # the prompt holds the start of the message that the response continues
            self.feed(begun)

    def _opens_at_once(self) -> Steps[bool]:
        return bool((yield from self._accept(_HEAD_INSIDE)))

    def _read_calls(self) -> Steps[bool]:
        head = self._unsettled
        if not head.endswith(MESSAGE):
            rest = yield from self._read_until(_HEAD_END)
            if rest is None:
                return False
            if not self._unsettled.endswith(MESSAGE):  # it has no end: what stands there is content
                self._give_content(rest)
                self._at -= len(_NEXT_HEADS[0]) if self._unsettled.endswith(_NEXT_HEADS[0]) else 0
                self._take()
                return True
            head += rest
        self._take()
        function = self._called(head)
        unknown = _KNOWN_IN_HEAD.sub("", head).strip()
        if function is not None:
            yield from self._pass_call(function, unknown)
        elif _found(_CHANNEL, head) == "analysis" or self._goes_to_nobody(head):
            self._give_reasoning(unknown)
            yield from self._pass_message(self._give_reasoning)
        else:
            self._separates = self._has_answered
            self._give_content(unknown)
            yield from self._pass_message(self._give_content)
        return True

    def _called(self, head: str) -> str | None:
        """The function that a message goes to, if the client offers it."""
        recipient = _found(_RECIPIENT, head)
        if not self._reads_calls or recipient is None:
            return None
        function = recipient.removeprefix(_FUNCTIONS)
        return function if recipient != function or function in self._tools else None

    def _goes_to_nobody(self, head: str) -> bool:
        """Whether a message is a call of something that the client does not offer: then it is not
        shown."""
        return self._reads_calls and _found(_RECIPIENT, head) is not None

    def _pass_call(self, function: str, unknown: str) -> Steps[None]:
        self._begin_call(function)
        self._give_stray(unknown)
        self._has_arguments = False
        ended = yield from self._pass_message(self._give_arguments)
        # The token that ends a call ends the response, and is then no part of its text.
        self.is_cut = self._has_arguments and not ended

    def _pass_message(self, give: Callable[[str], None]) -> Steps[bool]:
        """Give the text of a message; True if it has an end. A header that follows without one is
        left unread."""
        end = yield from self._pass_until(_MESSAGE_END, give)
        if end in _NEXT_HEADS:
            self._at = self._begin
        self._take()
        return bool(end)

    def _give_arguments(self, text: str) -> None:
        self._has_arguments = self._has_arguments or bool(text.strip())
        super()._give_arguments(text)

    def _give_content(self, text: str) -> None:
        """Give text for the user; messages are apart from each other."""
        if self._separates and text:
            super()._give_content("\n\n")
            self._separates = False
        self._has_answered = self._has_answered or bool(text)
        super()._give_content(text)

    def _give_reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(ReasoningDelta(text))


def _found(pattern: re.Pattern[str], head: str) -> str | None:
    found = pattern.search(head)
    return found.group(1) if found else None

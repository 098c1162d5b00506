"""The interface of tool parsers: they take a response's text in pieces of any size, and return content and
tool calls.

They do not know where the text comes from or how the calls are sent on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from engine.records.messages import ToolCall


@dataclass(slots=True)
class ContentDelta:
    """Text for the user, not part of any call."""

    text: str


@dataclass(slots=True)
class ReasoningDelta:
    """Text of the model's reasoning: shown separately from the answer, and never parsed for calls."""

    text: str


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of the call number ``index``: the first has id and name, later ones only argument text."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    stray: str = ""
    """Text inside the call that is neither an argument nor markup."""


ReplyDelta = ContentDelta | ReasoningDelta | ToolCallDelta


class ReplyParser(Protocol):
    """Parses one response. The sum of its outputs must not depend on how the text was split."""

    def feed(self, text: str) -> list[ReplyDelta]:
        """Takes the next piece of the response; returns the deltas that have become certain."""

    def finish(self) -> list[ReplyDelta]:
        """Ends the response; returns the deltas that were held back."""


class PlainParser:
    """Parses a response without calls: all of it is content."""

    def feed(self, text: str) -> list[ReplyDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[ReplyDelta]:
        return []


@dataclass(slots=True)
class ReadCall:
    """One whole tool call of a response."""

    call_id: str
    name: str
    _pieces: list[str]

    @property
    def arguments(self) -> str:
        return "".join(self._pieces)


@dataclass(slots=True)
class ParsedReply:
    """A response so far: the sum of its deltas."""

    calls: list[ReadCall] = field(default_factory=list)
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The model's reasoning before its answer; empty if its format has none."""
        return "".join(self._reasoning)

    def add(self, deltas: Iterable[ReplyDelta]) -> None:
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
                self._reasoning.append(delta.text)
            elif delta.name is not None:
                assert delta.call_id is not None
                assert delta.index == len(self.calls)
                self.calls.append(ReadCall(delta.call_id, delta.name, [delta.arguments]))
            else:
                self.calls[delta.index]._pieces.append(delta.arguments)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls in the engine's form."""
        return [ToolCall(call.name, call.arguments) for call in self.calls]


def read_reply(parser: ReplyParser, text: str) -> ParsedReply:
    """Parses a whole response at once, on the same path as a stream, so with the same result."""
    reply = ParsedReply()
    reply.add(parser.feed(text))
    reply.add(parser.finish())
    return reply


def new_call_id() -> str:
    """Returns an id in the form that OpenAI's clients use."""
    return f"call_{uuid4().hex[:24]}"

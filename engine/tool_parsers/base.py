"""What a tool parser is: fed a response's text in pieces of any size, it yields content and tool calls.

It does not know where the text comes from nor how the calls are sent on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from engine.messages import ToolCall


@dataclass(slots=True)
class ContentDelta:
    """Text for the user, not part of any call."""

    text: str


@dataclass(slots=True)
class ReasoningDelta:
    """Text of the model's reasoning: shown apart from the answer, and never parsed for calls."""

    text: str


@dataclass(slots=True)
class ToolCallDelta:
    """A piece of the call number ``index``: the first carries id and name, later ones argument text
    only."""

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
    stray: str = ""
    """Text that the model wrote inside the call, and that is neither an argument nor markup."""


ReplyDelta = ContentDelta | ReasoningDelta | ToolCallDelta


class ReplyParser(Protocol):
    """Parses one response. The sum of what it yields must not depend on how the text was split."""

    def feed(self, text: str) -> list[ReplyDelta]:
        """Take the next piece of the response; return what has become certain."""

    def finish(self) -> list[ReplyDelta]:
        """The response has ended: return what was held back."""


class PlainParser:
    """A response without calls: all of it is content."""

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
        """The model's reasoning before its answer; empty where its format shows none."""
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
        """The calls in the form that the engine takes."""
        return [ToolCall(call.name, call.arguments) for call in self.calls]


def read_reply(parser: ReplyParser, text: str) -> ParsedReply:
    """Parse a whole response at once: the same path as a stream, so the same result."""
    reply = ParsedReply()
    reply.add(parser.feed(text))
    reply.add(parser.finish())
    return reply


def new_call_id() -> str:
    """An id in the form that OpenAI's clients know."""
    return f"call_{uuid4().hex[:24]}"

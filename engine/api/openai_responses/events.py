"""The events of a streamed response, in their format on the wire. This module does not decide their order."""

from __future__ import annotations

import msgspec

from engine.api.http import sse
from engine.api.openai.bodies import ChatTokenLogprob
from engine.api.openai_responses.items import OutputItem, OutputText, ReasoningText, Response


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """Common fields of events; the sequence number is set when the event is sent."""

    sequence_number: int = 0

    def encode(self) -> bytes:
        """The encoded event, named by its type."""
        return sse.event(self, str(self.__struct_config__.tag))


class _OfResponse(Event, kw_only=True):
    response: Response


class ResponseCreated(_OfResponse, kw_only=True, tag="response.created"):
    """The first event of every stream."""


class ResponseQueued(_OfResponse, kw_only=True, tag="response.queued"):
    """A background response has been queued."""


class ResponseInProgress(_OfResponse, kw_only=True, tag="response.in_progress"):
    """The model has begun."""


class ResponseCompleted(_OfResponse, kw_only=True, tag="response.completed"):
    """The last event of a response that completed."""


class ResponseIncomplete(_OfResponse, kw_only=True, tag="response.incomplete"):
    """The last event of a response that was cut off by its length."""


class ResponseFailed(_OfResponse, kw_only=True, tag="response.failed"):
    """The last event of a response that failed or was cancelled, as its status says. OpenAI has no event for
    cancellation, and clients wait for one that they know."""


class ErrorEvent(Event, kw_only=True, tag="error"):
    """An error; ``response.failed`` follows."""

    code: str
    message: str
    param: str | None = None


class OutputItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    """An item begins; it is still empty."""

    output_index: int
    item: OutputItem


class OutputItemDone(Event, kw_only=True, tag="response.output_item.done"):
    """The complete item, as in the response's output."""

    output_index: int
    item: OutputItem


class _OfItem(Event, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, kw_only=True):
    content_index: int = 0


class ContentPartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    """A part of an item begins."""

    part: OutputText | ReasoningText


class ContentPartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    """The complete part."""

    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart, kw_only=True, tag="response.output_text.delta"):
    """More text of a message."""

    delta: str
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(_OfPart, kw_only=True, tag="response.output_text.done"):
    """All text of a message."""

    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningTextDelta(_OfPart, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning text."""

    delta: str


class ReasoningTextDone(_OfPart, kw_only=True, tag="response.reasoning_text.done"):
    """All reasoning text."""

    text: str


class FunctionCallArgumentsDelta(_OfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of a call's arguments."""

    delta: str


class FunctionCallArgumentsDone(_OfItem, kw_only=True, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    name: str
    arguments: str


class CustomCallInputDelta(_OfItem, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More of a custom tool's input."""

    delta: str


class CustomCallInputDone(_OfItem, kw_only=True, tag="response.custom_tool_call_input.done"):
    """All of a custom tool's input."""

    input: str

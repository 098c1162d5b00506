"""Converts a model's reply to output items: takes parsed deltas, returns events and complete items.

It does not know the engine. The result does not depend on how the reply was split.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET
from msgspec.structs import replace

from engine.api.openai.bodies import ChatTokenLogprob
from engine.api.openai_responses.custom_input import CustomInputReader
from engine.api.openai_responses.events import (
    ContentPartAdded,
    ContentPartDone,
    CustomCallInputDelta,
    CustomCallInputDone,
    Event,
    FunctionCallArgumentsDelta,
    FunctionCallArgumentsDone,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    ReasoningTextDelta,
    ReasoningTextDone,
)
from engine.api.openai_responses.input_items import seal_reasoning
from engine.api.openai_responses.items import (
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    item_id,
)
from engine.api.openai_responses.tools import Tools
from engine.tool_parsers import ContentDelta, ReasoningDelta, ReplyDelta, ToolCallDelta


class _OpenItem(Protocol):
    """An item that is still growing."""

    def begin(self) -> list[Event]:
        """Returns the events of the empty item."""

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        """Returns the events of a delta."""

    def end(self, status: ItemStatus) -> list[Event]:
        """Returns the events of the end; the last one holds the item, complete or cut off."""


class Reply:
    """Reads one reply."""

    def __init__(self, response_id: str, tools: Tools, *, seals_reasoning: bool = False) -> None:
        self._response_id = response_id
        self._tools = tools
        self._seals_reasoning = seals_reasoning
        self._open: _OpenItem | None = None
        self._kind: object = None
        """The kind of the open item: a type of delta, or the index of a call."""
        self._logprobs: list[ChatTokenLogprob] = []
        """Logprobs of tokens whose text the parser still holds back."""
        self.items: list[OutputItem] = []
        """Completed items."""

    def add(self, deltas: Iterable[ReplyDelta], logprobs: list[ChatTokenLogprob]) -> list[Event]:
        """Adds deltas. Their ``logprobs`` go to message text where possible: a parser does not report which
        tokens belong to a call."""
        self._logprobs += logprobs
        events: list[Event] = []
        for delta in deltas:
            events += self._add_one(delta)
        return events

    def end(self, status: ItemStatus) -> list[Event]:
        """Ends the reply. One without items gets an empty message."""
        events = [] if self.items or self._open else self._begin(ContentDelta, self._message())
        return events + self._close(status)

    def _add_one(self, delta: ReplyDelta) -> list[Event]:
        kind: object = delta.index if isinstance(delta, ToolCallDelta) else type(delta)
        events = [] if kind == self._kind else self._switch(delta, kind)
        assert self._open is not None
        logprobs = self._logprobs
        self._logprobs = []
        match delta:
            case ContentDelta(text):
                events += self._open.add(text, logprobs)
            case ReasoningDelta(text) | ToolCallDelta(arguments=text):
                events += self._open.add(text, [])
        return events

    def _switch(self, delta: ReplyDelta, kind: object) -> list[Event]:
        """Completes the open item and starts another."""
        events = self._close("completed")
        match delta:
            case ContentDelta():
                return events + self._begin(kind, self._message())
            case ReasoningDelta():
                return events + self._begin(kind, self._reasoning())
            case ToolCallDelta():
                return events + self._begin(kind, self._call(delta))

    def _begin(self, kind: object, item: _OpenItem) -> list[Event]:
        self._open = item
        self._kind = kind
        return item.begin()

    def _close(self, status: ItemStatus) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.end(status)
        done = events[-1]
        assert isinstance(done, OutputItemDone)
        self.items.append(done.item)
        self._open = None
        self._kind = None
        return events

    def _id(self, prefix: str) -> str:
        return item_id(prefix, self._response_id, len(self.items))

    def _message(self) -> _OpenItem:
        return _OpenMessage(MessageItem(id=self._id("msg")), len(self.items))

    def _reasoning(self) -> _OpenItem:
        return _OpenReasoning(ReasoningItem(id=self._id("rs")), len(self.items), self._seals_reasoning)

    def _call(self, delta: ToolCallDelta) -> _OpenItem:
        assert delta.name is not None
        assert delta.call_id is not None
        tool = self._tools.find(delta.name)
        index = len(self.items)
        namespace = UNSET if tool.namespace is None else tool.namespace
        if tool.is_custom:
            custom = CustomCallItem(
                id=self._id("ctc"), call_id=delta.call_id, name=tool.name, namespace=namespace
            )
            return _OpenCustomCall(custom, index)
        call = FunctionCallItem(id=self._id("fc"), call_id=delta.call_id, name=tool.name, namespace=namespace)
        return _OpenCall(call, index)


@dataclass(slots=True)
class _OpenMessage:
    _item: MessageItem
    _index: int
    _pieces: list[str] = field(default_factory=list)
    _logprobs: list[ChatTokenLogprob] = field(default_factory=list)

    def begin(self) -> list[Event]:
        return [
            OutputItemAdded(output_index=self._index, item=self._item),
            ContentPartAdded(item_id=self._item.id, output_index=self._index, part=OutputText()),
        ]

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        if not text:
            return []
        self._pieces.append(text)
        self._logprobs += logprobs
        return [
            OutputTextDelta(item_id=self._item.id, output_index=self._index, delta=text, logprobs=logprobs)
        ]

    def end(self, status: ItemStatus) -> list[Event]:
        part = OutputText(text="".join(self._pieces), logprobs=self._logprobs)
        item = replace(self._item, status=status, content=[part])
        return [
            OutputTextDone(item_id=item.id, output_index=self._index, text=part.text, logprobs=part.logprobs),
            ContentPartDone(item_id=item.id, output_index=self._index, part=part),
            OutputItemDone(output_index=self._index, item=item),
        ]


@dataclass(slots=True)
class _OpenReasoning:
    _item: ReasoningItem
    _index: int
    _seals: bool
    _pieces: list[str] = field(default_factory=list)

    def begin(self) -> list[Event]:
        return [
            OutputItemAdded(output_index=self._index, item=self._item),
            ContentPartAdded(item_id=self._item.id, output_index=self._index, part=ReasoningText()),
        ]

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        if not text:
            return []
        self._pieces.append(text)
        return [ReasoningTextDelta(item_id=self._item.id, output_index=self._index, delta=text)]

    def end(self, status: ItemStatus) -> list[Event]:
        part = ReasoningText(text="".join(self._pieces))
        sealed = seal_reasoning(part.text) if self._seals else UNSET
        item = replace(self._item, status=status, content=[part], encrypted_content=sealed)
        return [
            ReasoningTextDone(item_id=item.id, output_index=self._index, text=part.text),
            ContentPartDone(item_id=item.id, output_index=self._index, part=part),
            OutputItemDone(output_index=self._index, item=item),
        ]


@dataclass(slots=True)
class _OpenCall:
    _item: FunctionCallItem
    _index: int
    _pieces: list[str] = field(default_factory=list)

    def begin(self) -> list[Event]:
        return [OutputItemAdded(output_index=self._index, item=self._item)]

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        if not text:
            return []
        self._pieces.append(text)
        return [FunctionCallArgumentsDelta(item_id=self._item.id, output_index=self._index, delta=text)]

    def end(self, status: ItemStatus) -> list[Event]:
        item = replace(self._item, status=status, arguments="".join(self._pieces))
        return [
            FunctionCallArgumentsDone(
                item_id=item.id, output_index=self._index, name=item.name, arguments=item.arguments
            ),
            OutputItemDone(output_index=self._index, item=item),
        ]


@dataclass(slots=True)
class _OpenCustomCall:
    _item: CustomCallItem
    _index: int
    _reader: CustomInputReader = field(default_factory=CustomInputReader)
    _pieces: list[str] = field(default_factory=list)

    def begin(self) -> list[Event]:
        return [OutputItemAdded(output_index=self._index, item=self._item)]

    def add(self, text: str, logprobs: list[ChatTokenLogprob]) -> list[Event]:
        return self._give(self._reader.feed(text))

    def end(self, status: ItemStatus) -> list[Event]:
        events = self._give(self._reader.finish())
        item = replace(self._item, status=status, input="".join(self._pieces))
        return [
            *events,
            CustomCallInputDone(item_id=item.id, output_index=self._index, input=item.input),
            OutputItemDone(output_index=self._index, item=item),
        ]

    def _give(self, text: str) -> list[Event]:
        if not text:
            return []
        self._pieces.append(text)
        return [CustomCallInputDelta(item_id=self._item.id, output_index=self._index, delta=text)]

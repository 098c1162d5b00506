"""Formats whose answer is between tags, which are not content: Cohere's, Ernie's and Hunyuan's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.tool_parsers.parameters import Tool
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged.json_between import JsonBetweenTags
from engine.tool_parsers.tagged_reader import TaggedReader

_LINE_BREAK = Tag("\n")


@dataclass(frozen=True)
class Frame:
    """The tags around the answer of one family."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    line_breaks: int = 0
    """Line breaks of the template between the tags and the answer."""


class FramedReader(TaggedReader):
    """Parses a response without calls: its text without the tags around it.

    A tag is part of the frame only at the frame's positions: the first before all other text, the last after
    it. Elsewhere it is text.
    """

    frame: Frame
    calls: Tag | None = None
    """The tag that announces calls, which may follow the answer."""
    _said = False
    """Whether there was any content."""
    _framed = False
    """Whether the answer began with its tag."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        texts = () if self.calls is None else self.calls.texts
        self.opening = Tag(*self.frame.begins, *self.frame.ends, *texts, line_breaks=self.frame.line_breaks)

    def _give_content(self, text: str) -> None:
        self._said = self._said or not (text == "" or text.isspace())
        super()._give_content(text)

    def _read_calls(self) -> Steps[bool]:
        return (yield from self._read_frame())

    def _read_frame(self) -> Steps[bool]:
        """Moves past a frame tag, which has been read, and its line break; False if the tag is text."""
        if self._unsettled.endswith(self.frame.begins):
            is_tag = not self._said and not self._framed
            self._framed = self._framed or is_tag
        else:
            is_tag = self._framed and (yield from self._is_last())
            self._framed = self._framed and not is_tag
        if is_tag and self.frame.line_breaks:
            yield from self._accept(_LINE_BREAK)
        return is_tag

    def _is_last(self) -> Steps[bool]:
        """Whether only calls or nothing follow. The position does not change."""
        length = self._length
        yield from self._skip_space()
        is_last = not (yield from self._peek()) or (
            self.calls is not None and bool((yield from self._accept(self.calls)))
        )
        self._at = self._begin + length
        return is_last


class FramedCalls(FramedReader, JsonBetweenTags):
    """Parses a response with calls in JSON after its answer, or instead of it."""

    def _read_calls(self) -> Steps[bool]:
        if self._unsettled.endswith((*self.frame.begins, *self.frame.ends)):
            return (yield from self._read_frame())
        return (yield from JsonBetweenTags._read_calls(self))


COHERE = Frame(("<|START_RESPONSE|>", "<|START_TEXT|>"), ("<|END_RESPONSE|>", "<|END_TEXT|>"))
ERNIE = Frame(("<response>",), ("</response>",), line_breaks=1)
HUNYUAN = Frame(("<answer>",), ("</answer>",), line_breaks=1)


class CohereToolParser(FramedCalls):
    """Parses calls of Command A and R7B: ``<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ...,
    "parameters": {...}}]<|END_ACTION|>``."""

    frame = COHERE
    calls = Tag("<|START_ACTION|>")
    closing = Tag("<|END_ACTION|>")
    raw_end = Tag("<|START_ACTION|>", "<|END_ACTION|>")
    name_keys = frozenset({"tool_name", "name"})


class ErnieToolParser(FramedCalls):
    """Parses calls of Ernie 4.5: as in Hermes' format, after an answer in ``<response>``."""

    frame = ERNIE
    calls = Tag("<tool_call>")
    closing = Tag("</tool_call>")
    raw_end = Tag("<tool_call>", "</tool_call>")


class HunyuanToolParser(FramedCalls):
    """Parses calls of Hunyuan A13B and Jamba: ``<tool_calls>[...]</tool_calls>``, after an answer in
    ``<answer>`` if the model has reasoned."""

    frame = HUNYUAN
    calls = Tag("<tool_calls>")
    closing = Tag("</tool_calls>")
    raw_end = Tag("<tool_calls>", "</tool_calls>")


class _HunyuanAnswer(FramedReader):
    frame = HUNYUAN


class _CohereAnswer(FramedReader):
    frame = COHERE


class _ErnieAnswer(FramedReader):
    frame = ERNIE


COHERE_ANSWER: Callable[[], FramedReader] = _CohereAnswer
ERNIE_ANSWER: Callable[[], FramedReader] = _ErnieAnswer
HUNYUAN_ANSWER: Callable[[], FramedReader] = _HunyuanAnswer

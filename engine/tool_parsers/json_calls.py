"""Tool calls as bare JSON, as in Llama 3 and in a response that is forced to call.

Most of them have no tag, so they must name one of the tools: an answer in JSON may look the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.tool_parsers.call_object import FENCE, FENCES, CallObjectReader, JsonScanner
from engine.tool_parsers.parameters import Tool
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged_reader import TaggedReader

PYTHON_TAG = "<|python_tag|>"

_FENCE_END = Tag("```")
_REST_OF_TAG = Tag("TOOL_CALLS]")
_OBJECT = Tag("{")
_COLON = Tag(":")


class Llama3JsonToolParser(TaggedReader, CallObjectReader):
    """``{"name": ..., "parameters": {...}}``, several with ``;`` between them, or a list of them.

    They come after ``<|python_tag|>``, or anywhere outside of other JSON.
    """

    opening = Tag(PYTHON_TAG, "{", "[", *(fence + "{" for fence in FENCES), line_breaks=2)
    announced_by: tuple[str, ...] = (PYTHON_TAG,)
    """Openings that only calls have."""

    def _opens_at_once(self) -> Steps[bool]:
        yield from self._skip_space()
        return (yield from self._peek()) in ("{", "[")

    def _read_opened(self) -> Steps[bool]:
        length = self._length
        if (yield from self._read_calls()):
            self._take()
            return True
        self._at = self._begin + length - self._text.startswith("{", self._begin + length - 1)
        if not (yield from self._pass_other_object()):
            self._go_back(length)
        return False

    def _read_calls(self) -> Steps[bool]:
        opened = self._unsettled.lstrip()
        if opened.endswith(("{", "[")):
            self._at -= 1
        yield from self._skip_space()
        if not (yield from self._read_call_objects(bare=opened not in self.announced_by)):
            return False
        yield from self._skip_layout(_FENCE_END)
        yield from self._skip_closing()
        return True

    def _pass_other_object(self) -> Steps[bool]:
        """Passes on an object that is not a call, which contains none either, as content. False if there is
        no object here."""
        begin = self._length
        if not (yield from self._accept(_OBJECT)):
            return False
        yield from self._skip_space()
        key = yield from self._read_string()
        yield from self._skip_space()
        if key is None or not (yield from self._accept(_COLON)):
            return False
        scanner = JsonScanner()
        self._at = self._begin + begin
        while True:
            end = scanner.scan(self._text, self._at)
            self._at = len(self._text) if end is None else end
            self._give_content(self._unsettled)
            self._take()
            if end is not None or not (yield from self._more()):
                return True


class XlamToolParser(Llama3JsonToolParser):
    """Parses calls of xLAM: a list of ``{"name": ..., "arguments": {...}}``, bare, in a fence, after
    ``[TOOL_CALLS]`` or between ``<tool_call>`` and ``</tool_call>``."""

    opening = Tag(
        *("<tool_call>", "{", "["), *(fence + first for fence in FENCES for first in "[{"), line_breaks=2
    )
    closing = Tag("</tool_call>")
    raw_end = Tag("<tool_call>", "</tool_call>")
    announced_by = ("<tool_call>",)

    def _read_calls(self) -> Steps[bool]:
        if not self._unsettled.endswith("[") or not (yield from self._accept(_REST_OF_TAG)):
            return (yield from super()._read_calls())
        yield from self._skip_space()
        return (yield from self._read_call_objects())


class JsonToolParser(CallObjectReader):
    """Parses a response that is one call object, or a list of them; any other text is content."""

    def __init__(self, tools: Sequence[Tool] = (), *, listed: bool = False) -> None:
        """``listed``: only a list is read as calls, for a response that was forced to be a list or an answer
        in JSON."""
        super().__init__(tools)
        self._listed = listed

    def _read(self) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._accept(FENCE)):
            yield from self._skip_space()
        if self._listed and (yield from self._peek()) != "[":
            return
        if (yield from self._read_call_objects(bare=True)):
            yield from self._skip_space()
            yield from self._accept(_FENCE_END)
            yield from self._skip_space()
            if self._at == len(self._text):
                self._take()

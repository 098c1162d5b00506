"""Makes every parser's output valid for clients: whole calls have a JSON object as arguments, and white space
next to calls is not content. A call that a length limit cut off before its arguments is not shown.

This module does not know formats.
"""

from __future__ import annotations

from engine.tool_parsers.arguments import CallArguments
from engine.tool_parsers.base import ContentDelta, ReplyDelta, ReplyParser, ToolCallDelta


class SoundCalls:
    """Parses one response with another parser. A call that was cut off by the response's end keeps the part
    that arrived."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser
        self._index = -1
        """Index of the last call."""
        self._arguments: CallArguments | None = None
        """Arguments of the open call."""
        self._space = ""
        """White space that is held back because a call may follow."""
        self._has_content = False

    def feed(self, text: str) -> list[ReplyDelta]:
        """Takes the next piece of the response; returns the deltas that have become certain."""
        return self._sound(self._parser.feed(text))

    def finish(self, *, is_whole: bool = True) -> list[ReplyDelta]:
        """Ends the response; returns the deltas that were held back. ``is_whole``: the model ended it, so it
        may have ended a call, too."""
        deltas = self._sound(self._parser.finish())
        if self._arguments is not None and (
            self._arguments.is_closed or (is_whole and not self._is_cut(self._arguments))
        ):
            self._end_call(deltas)
        elif self._arguments is not None and (rest := self._arguments.leave()):
            deltas.append(ToolCallDelta(self._index, arguments=rest))
        head: str = getattr(self._parser, "cut_head", "")
        if is_whole and head:  # the model ended the response there, so the text is not a call and is shown
            self._add_content(ContentDelta(head), deltas)
        if self._space and self._index < 0:
            deltas.append(ContentDelta(self._space))
            self._space = ""
        return deltas

    def _is_cut(self, arguments: CallArguments) -> bool:
        """Whether the last call was cut off. A plug-in's parser may not report it; then any argument text
        counts as cut off."""
        cut = getattr(self._parser, "answer_is_cut", getattr(self._parser, "is_cut", None))
        return arguments.has_begun if cut is None else bool(cut)

    def _sound(self, deltas: list[ReplyDelta]) -> list[ReplyDelta]:
        sound: list[ReplyDelta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                self._add_call(delta, sound)
            elif isinstance(delta, ContentDelta):
                self._add_content(delta, sound)
            else:
                self._end_call(sound)
                sound.append(delta)
        return sound

    def _add_content(self, delta: ContentDelta, sound: list[ReplyDelta]) -> None:
        if self._has_content:
            sound.append(delta)
            return
        self._space += delta.text
        if not self._space or self._space.isspace():
            return
        self._end_call(sound)
        self._has_content = True
        sound.append(ContentDelta(self._space))
        self._space = ""

    def _add_call(self, delta: ToolCallDelta, sound: list[ReplyDelta]) -> None:
        if delta.name is not None:
            self._end_call(sound)
            self._space = ""
            self._has_content = False
            self._index = delta.index
            self._arguments = CallArguments()
        elif delta.index != self._index or self._arguments is None:
            return
        assert self._arguments is not None
        piece = self._arguments.feed(delta.arguments)
        if delta.stray:
            self._arguments.add_stray(delta.stray)
        if piece or delta.name is not None:
            sound.append(ToolCallDelta(delta.index, delta.call_id, delta.name, piece))

    def _end_call(self, sound: list[ReplyDelta]) -> None:
        arguments = self._arguments
        self._arguments = None
        if arguments is not None and (rest := arguments.finish(is_whole=True)):
            sound.append(ToolCallDelta(self._index, arguments=rest))

"""The base of formats in which an opening tag announces calls: handles the text around and between calls."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence

from engine.tool_parsers.parameters import Tool
from engine.tool_parsers.reader import ReplyReader, Steps, Tag

_MIN_HEAD_CHARS = 4
"""A shorter beginning of a tag, at the end of a reply that was cut off, is read as text."""
_FENCE_LINE = re.compile(r" {0,3}(`{3,}|~{3,})([^\n]*)")
_MAX_FENCE_CHARS = 200
"""Maximum length of the part of a line that is examined."""
_EMPTY_LIST = Tag("[]", "[ ]")
_TOO_MANY = re.compile(r"[}\])`\s]*+")
"""Matches superfluous text that models write after a call: closing brackets, the end of a fence."""


class Fences:
    """Tracks whether content that arrives in pieces has an open fence of code, as CommonMark defines it: a
    call in a fence is an example."""

    def __init__(self) -> None:
        self._line = ""
        self._opened = ""
        """The characters that opened the fence."""

    def read(self, text: str) -> None:
        *lines, rest = text.split("\n")
        for line in lines:
            self._opened = _fence_behind(self._opened, self._line + line)
            self._line = ""
        self._line += rest[: _MAX_FENCE_CHARS - len(self._line)]

    @property
    def is_open(self) -> bool:
        """Whether a fence is open at the position reached, as if its line ended here."""
        return bool(_fence_behind(self._opened, self._line))


def _fence_behind(opened: str, line: str) -> str:
    """The fence that is open after a line, which may open or close one."""
    found = _FENCE_LINE.fullmatch(line)
    if found is None:
        return opened
    marks, info = found.groups()
    if opened:
        closes = marks[0] == opened[0] and len(marks) >= len(opened) and not info.strip()
        return "" if closes else opened
    return "" if marks[0] == "`" and "`" in info else marks


class TaggedReader(ReplyReader):
    """Base of formats in which an opening tag announces calls; white space between and after calls is
    layout."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._fences = Fences()

    opening: Tag
    closing: Tag | None = None
    """The tag that ends one call or several. A late one is not content either."""
    _late = False
    """Whether a closing tag is still expected."""
    _aside = ""
    """Text in a section that is not a call, and has not been output: it is content if there is a call."""

    def _read(self) -> Steps[None]:
        opened = yield from self._opens_at_once()
        if not opened:
            self._at = self._begin
        while opened or (yield from self._pass_until_opening()):
            if not opened and self._fences.is_open and self._announces(self._unsettled):
                self._go_back(self._length)  # an example, not a call
                continue
            opened = False
            while (yield from self._read_opened()):
                yield from self._skip_stray_ends()
                if self._at == len(self._text):  # the response has ended
                    self._take()
                    return
                if not (yield from self._accept(self.opening)):
                    self._at = self._begin
                    break
            if self.cut_head:
                return

    def _skip_stray_ends(self) -> Steps[None]:
        """Moves past white space after a call, and settles closing tags that close nothing."""
        yield from self._skip_space()
        ends = self._ends_of_nothing
        while ends is not None and (yield from self._accept(ends)):
            self._take()
            yield from self._skip_space()

    def _pass_until_opening(self) -> Steps[str]:
        """Outputs the text before the next opening tag, and moves past the tag."""
        while self.closing is not None and self._late:
            tag = Tag(*self.opening.texts, *self.closing.texts, line_breaks=self.opening.line_breaks)
            found = yield from self._pass_until(tag, self._give_content, leaves_head=True)
            if not found:
                return self._leave_head()
            if not found.endswith(self.closing.texts):
                return found
            self._take()
            self._late = False
        found = yield from self._pass_until(self.opening, self._give_content, leaves_head=True)
        return found or self._leave_head()

    def _leave_head(self) -> str:
        """Handles the rest at the response's end, which may be the beginning of an opening tag."""
        self._at = len(self._text)
        head = self._unsettled.lstrip("\n")
        if len(head) >= _MIN_HEAD_CHARS and self._announces(head):
            self.cut_head = self._unsettled
            self._take()
        return ""

    def _opens_at_once(self) -> Steps[bool]:
        """Whether the response begins with a possible call, although no tag announces it."""
        yield from ()
        return False

    def _announces(self, opening: str) -> bool:
        """Whether an opening, or its beginning, is markup and not a text that answers contain, too."""
        return not opening.endswith(("{", "[")) and not opening.startswith("```")

    @property
    def _ends_of_nothing(self) -> Tag | None:
        """Closing tags, which are layout after a call, and after an opening tag that opens nothing."""
        return self.closing

    def _read_opened(self) -> Steps[bool]:
        """Reads after an opening tag: False if no call followed, so that the tag was content."""
        length = self._length
        opening = self._unsettled.lstrip("\n")
        if opening and self._announces(opening) and (yield from self._opens_nothing(opening)):
            return True
        self._at = self._begin + length
        self._ran_out = False
        self._aside = ""
        num_before = self._num_calls
        if (yield from self._read_calls()):
            self._take()
            self._give_aside()
            return True
        if self._ran_out and opening and self._announces(opening) and self._num_calls == num_before:
            only_tag = self._num_calls and not self._text[self._begin + length :].strip()
            self.cut_head = "" if only_tag else self._text[self._begin :]
            self._begin = self._at = len(self._text)
            return False
        self._go_back(length)
        return False

    def _begin_call(self, name: str, arguments: str = "") -> None:
        self._give_aside()
        super()._begin_call(name, arguments)

    def _give_aside(self) -> None:
        aside = self._aside
        self._aside = ""
        self._give_content(aside)

    def _give_content(self, text: str) -> None:
        self._fences.read(text)
        super()._give_content(text)

    def _opens_nothing(self, opening: str) -> Steps[bool]:
        """Whether an opening tag is followed by its end, or written twice: then it is layout."""
        length = self._length
        yield from self._skip_space()
        listed = yield from self._accept(_EMPTY_LIST)
        yield from self._skip_space()
        ends = self._ends_of_nothing
        is_block = not opening.endswith(('"', "="))
        if (is_block and ends is not None and (yield from self._accept(ends))) or (listed and ends is None):
            self._take()
            return True
        self._at = self._begin + length
        yield from self._skip_space()
        if is_block and (yield from self._accept(Tag(opening))):
            self._begin += length
            self._at = self._begin
            return True
        return False

    @abstractmethod
    def _read_calls(self) -> Steps[bool]:
        """Reads the calls after an opening tag; False if there is none. The text after them is left
        unread."""

    def _skip_closing(self) -> Steps[None]:
        """Moves past a call's closing tag, and superfluous brackets before it; settles them. They may also
        come before the next call, or at the response's end."""
        self._take()
        yield from self._read_word(_TOO_MANY)
        if self.closing is not None and (yield from self._accept(self.closing)):
            self._late = False
        elif self._ended and (self.closing or self.opening).may_begin(self._text, self._at):
            self._at = len(self._text)
        else:
            length = self._length
            self._late = True
            follows = yield from self._accept(self.opening)
            self._at = self._begin + (length if follows else 0)
        self._take()

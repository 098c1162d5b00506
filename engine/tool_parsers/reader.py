"""Parses a response that comes in pieces, written as if it were all there: the base of every
format's parser.

A parser is one generator: it looks at the text, moves on, and yields wherever more text is needed
to decide. So each decision depends on the text alone and never on how it was split.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from engine.tool_parsers.base import ContentDelta, ReplyDelta, ToolCallDelta, new_call_id
from engine.tool_parsers.parameters import Tool, ToolSchemas

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Code that pauses wherever the text read so far is not enough; ``yield from`` gives its result."""

MAX_NAME_CHARS = 256
"""A longer text is not the name of a function or a parameter."""

_MIN_HEAD_CHARS = 4
"""A shorter beginning of a tag, at the end of a reply that was cut off, is taken for text."""

_FENCE_LINE = re.compile(r" {0,3}(`{3,}|~{3,})([^\n]*)")
_MAX_FENCE_CHARS = 200
"""Of a longer line only the beginning is looked at."""
_NOT_SPACE = re.compile(r"\S")
_TOO_MANY = re.compile(r"[}\])`\s]*+")
"""Superfluous text that models write after a call: closing brackets, the end of a fence."""


class Tag:
    """Texts that mark a position, and how many line breaks before them belong to the mark.

    Those are the line breaks that the chat template writes there: without them, a response that is
    sent back as messages is rendered to the text that was generated.
    """

    def __init__(self, *texts: str, line_breaks: int = 0) -> None:
        self.texts = texts
        self.line_breaks = line_breaks
        either = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        self._pattern = re.compile(f"\n{{0,{line_breaks}}}(?:{either})")
        whole = [n * "\n" + text for text in texts for n in range(line_breaks + 1)]
        self._starts = {text[:length] for text in whole for length in range(1, len(text))}
        self.longest = max(map(len, self._starts), default=0)
        """Length of the longest text that may yet become the tag."""

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def match(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.match(text, start)

    def may_begin(self, text: str, start: int) -> bool:
        """Whether all of the text from here on may be the beginning of the tag."""
        return start == len(text) or text[start:] in self._starts

    def num_held(self, text: str, start: int) -> int:
        """Length of the text's end that may turn out to be the beginning of the tag."""
        for begin in range(max(start, len(text) - self.longest), len(text)):
            if text[begin:] in self._starts:
                return len(text) - begin
        return 0


_EMPTY_LIST = Tag("[]", "[ ]")


class ReplyReader(ABC):
    """Parses one response. A format implements ``_read``.

    ``_begin`` is the start of the text that has not been given out, ``_at`` the position of the
    reader; the text between them may still turn out to be content.
    """

    is_cut = False
    """Whether the response ended inside its last call."""
    cut_head = ""
    """The beginning of a call, at the response's end, that does not say yet what it calls: content if the
    model ended the response there, nothing if its length did."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self._tools = ToolSchemas(tools)
        """The functions that the response may call."""
        self._text = ""
        self._begin = 0
        self._at = 0
        self._ended = False
        self._deltas: list[ReplyDelta] = []
        self._num_calls = 0
        self._ran_out = False
        """Whether a decision had to be made since no more text comes."""
        self._steps = self._read()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the whole response. What is left unread at the end is content."""

    def feed(self, text: str) -> list[ReplyDelta]:
        """Take the next piece of the response; return what has become certain."""
        held, self._text = self._text, ""
        if self._begin:
            held = held[self._begin :]
            self._at -= self._begin
            self._begin = 0
        held += text  # no other reference exists, so it grows in place: a long wait costs no copies
        self._text = held
        return self._run()

    def finish(self) -> list[ReplyDelta]:
        """The response has ended: return what was held back."""
        self._ended = True
        return self._run()

    def _run(self) -> list[ReplyDelta]:
        try:
            next(self._steps)
        except StopIteration:
            self._give_content(self._text[self._begin :])
            self._begin = self._at = len(self._text)
            self._steps = self._pass_on()
        deltas, self._deltas = self._deltas, []
        return deltas

    def _pass_on(self) -> Steps[None]:
        """All further text is content."""
        while True:
            self._give_content(self._text[self._begin :])
            self._begin = self._at = len(self._text)
            yield

    # The building blocks of a format's ``_read``.

    def _more(self) -> Steps[bool]:
        """Wait for text; False if no more will come."""
        if self._ended:
            self._ran_out = True
            return False
        yield
        return True

    def _take(self) -> None:
        """Settle what has been read so far."""
        self._begin = self._at

    def _go_back(self, length: int) -> None:
        """Read again from ``length`` characters after the start of the unsettled text; those were
        content."""
        end = self._begin + length
        self._give_content(self._text[self._begin : end])
        self._begin = self._at = end

    @property
    def _length(self) -> int:
        """Length of what has been read and is not settled."""
        return self._at - self._begin

    @property
    def _unsettled(self) -> str:
        return self._text[self._begin : self._at]

    def _skip_space(self) -> Steps[None]:
        while True:
            found = _NOT_SPACE.search(self._text, self._at)
            if found is not None:
                self._at = found.start()
                return
            self._at = len(self._text)
            if not (yield from self._more()):
                return

    def _skip_layout(self, *tags: Tag) -> Steps[str]:
        """Move past the tags that follow a call, apart from white space, and settle them; return
        the last one's text. A response that ends inside such a tag has still given it."""
        last = ""
        for tag in tags:
            self._take()
            yield from self._skip_space()
            text = yield from self._accept(tag)
            if text:
                last = text
            elif self._ended and tag.may_begin(self._text, self._at):
                self._at = len(self._text)
            else:
                self._at = self._begin
        self._take()
        return last

    def _peek(self) -> Steps[str]:
        """The next character; empty at the end of the response."""
        while self._at == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def _accept(self, tag: Tag) -> Steps[str]:
        """Move past a tag at this position; return its text, or an empty one if there is no tag here."""
        while True:
            found = tag.match(self._text, self._at)
            if found is not None:
                self._at = found.end()
                return found.group()
            if not tag.may_begin(self._text, self._at) or not (yield from self._more()):
                return ""

    def _pass_until(self, tag: Tag, give: Callable[[str], None], *, leaves_head: bool = False) -> Steps[str]:
        """Give out the text before the next tag and move past the tag; return its text, or an empty
        one if none came.

        The tag itself is not settled: it may yet be content. ``leaves_head``: nor is what may be its
        beginning at the response's end.
        """
        while True:
            found = tag.search(self._text, self._at)
            num_held = tag.num_held(self._text, self._at) if leaves_head else self._num_held(tag)
            end = found.start() if found else len(self._text) - num_held
            if end > self._at:
                give(self._text[self._at : end])
            self._begin = self._at = end
            if found is not None:
                self._at = found.end()
                return found.group()
            if not (yield from self._more()):
                return ""

    def _find(self, tag: Tag) -> Steps[str]:
        """Move past the next tag, wherever it is; return its text, or an empty one, with all read,
        if none came."""
        offset = self._length
        while True:
            found = tag.search(self._text, self._begin + offset)
            if found is not None:
                self._at = found.end()
                return found.group()
            offset = max(offset, len(self._text) - self._begin - tag.longest)
            self._at = len(self._text)
            if not (yield from self._more()):
                return ""

    def _look_ahead(self, tag: Tag) -> Steps[str]:
        """The text of the next tag, wherever it is; empty if none comes. The position does not
        change."""
        length = self._length
        found = yield from self._find(tag)
        self._at = self._begin + length
        return found

    def _num_held(self, tag: Tag) -> int:
        return 0 if self._ended else tag.num_held(self._text, self._at)

    def _read_word(self, chars: re.Pattern[str]) -> Steps[str]:
        """The text at this position as far as it matches; empty if it is longer than any name."""
        offset = self._length
        while True:
            found = chars.match(self._text, self._at)
            self._at = found.end() if found else self._at
            length = self._length - offset
            if length > MAX_NAME_CHARS:
                return ""
            if self._at < len(self._text) or not (yield from self._more()):
                return self._text[self._at - length : self._at]

    def _read_until(self, tag: Tag) -> Steps[str | None]:
        """The text before the next tag, which is consumed; None if none comes within the length of
        a name."""
        offset = self._length
        while True:
            start = self._begin + offset
            found = tag.search(self._text, start)
            if found is not None and found.start() - start <= MAX_NAME_CHARS:
                self._at = found.end()
                return self._text[start : found.start()]
            if len(self._text) - start > MAX_NAME_CHARS + tag.longest or not (yield from self._more()):
                return None

    # What a format gives out.

    def _give_content(self, text: str) -> None:
        if text:
            self._deltas.append(ContentDelta(text))

    def _begin_call(self, name: str, arguments: str = "") -> None:
        """A call is certain: settle what was read of it."""
        self._deltas.append(ToolCallDelta(self._num_calls, self._new_id(name), name, arguments))
        self._num_calls += 1
        self._take()

    def _give_arguments(self, text: str) -> None:
        """Give more of the last call's arguments."""
        if text:
            self._deltas.append(ToolCallDelta(self._num_calls - 1, arguments=text))

    def _give_stray(self, text: str) -> None:
        """Give text inside the last call that is neither an argument nor markup."""
        if text:
            self._deltas.append(ToolCallDelta(self._num_calls - 1, stray=text))

    def _new_id(self, name: str) -> str:
        return new_call_id()


class Fences:
    """Whether content that comes in pieces has opened a fence of code, as CommonMark defines it, and not
    closed it: a call in it is an example."""

    def __init__(self) -> None:
        self._line = ""
        self._opened = ""
        """The characters that opened it."""

    def read(self, text: str) -> None:
        *lines, rest = text.split("\n")
        for line in lines:
            self._opened = _fence_behind(self._opened, self._line + line)
            self._line = ""
        self._line += rest[: _MAX_FENCE_CHARS - len(self._line)]

    @property
    def is_open(self) -> bool:
        """At the position reached, as if its line ended here."""
        return bool(_fence_behind(self._opened, self._line))


def _fence_behind(opened: str, line: str) -> str:
    """The fence that is open behind a line, which may open or close one."""
    found = _FENCE_LINE.fullmatch(line)
    if found is None:
        return opened
    marks, info = found.groups()
    if opened:
        closes = marks[0] == opened[0] and len(marks) >= len(opened) and not info.strip()
        return "" if closes else opened
    return "" if marks[0] == "`" and "`" in info else marks


class TaggedReader(ReplyReader):
    """A format in which an opening tag announces calls; white space between and after them is layout."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._fences = Fences()

    opening: Tag
    closing: Tag | None = None
    """Ends a call, or several. A late one is not content either."""
    _late = False
    """Whether a closing tag is still expected."""
    _aside = ""
    """Text in a section that is no call, and has not been given out: it is content if there is a call."""

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
        """After a call: move past white space, and settle closing tags that close nothing."""
        yield from self._skip_space()
        ends = self._ends_of_nothing
        while ends is not None and (yield from self._accept(ends)):
            self._take()
            yield from self._skip_space()

    def _pass_until_opening(self) -> Steps[str]:
        """Give out the text before the next opening tag, and move past the tag."""
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
        """At the response's end: what is left may be the beginning of an opening tag."""
        self._at = len(self._text)
        head = self._unsettled.lstrip("\n")
        if len(head) >= _MIN_HEAD_CHARS and self._announces(head):
            self.cut_head = self._unsettled
            self._take()
        return ""

    def _opens_at_once(self) -> Steps[bool]:
        """Whether the response begins with what may be a call, though no tag announces it."""
        yield from ()
        return False

    def _announces(self, opening: str) -> bool:
        """Whether an opening, or the beginning of one, is markup and not a text that answers have, too."""
        return not opening.endswith(("{", "[")) and not opening.startswith("```")

    @property
    def _ends_of_nothing(self) -> Tag | None:
        """Closing tags, which are layout behind a call, and behind an opening tag that opens nothing."""
        return self.closing

    def _read_opened(self) -> Steps[bool]:
        """After an opening tag: False if no call followed, so that the tag was content."""
        length = self._length
        opening = self._unsettled.lstrip("\n")
        if opening and self._announces(opening) and (yield from self._opens_nothing(opening)):
            return True
        self._at = self._begin + length
        self._ran_out, self._aside = False, ""
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
        aside, self._aside = self._aside, ""
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
        """Read what follows an opening tag; False if it is no call. The text after it is left unread."""

    def _skip_closing(self) -> Steps[None]:
        """Move past a call's closing tag, and superfluous brackets before it; settle them. They may
        also come before the next call, or at the response's end."""
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

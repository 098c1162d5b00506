"""Parses a response that arrives in pieces, written as if it were complete: the base of every format's
parser.

A parser is one generator: it looks at the text, moves on, and yields wherever it needs more text to decide.
So each decision depends only on the text and never on how it was split.
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
"""Code that pauses wherever the text read so far is not enough; ``yield from`` returns its result."""

MAX_NAME_CHARS = 256
"""A longer text is not the name of a function or a parameter."""


_NOT_SPACE = re.compile(r"\S")


class Tag:
    """Texts that mark a position, and the maximum number of line breaks before them that belong to the mark.

    The chat template writes these line breaks: without them, a response that is sent back as messages is
    rendered to the text that was generated.
    """

    def __init__(self, *texts: str, line_breaks: int = 0) -> None:
        self.texts = texts
        self.line_breaks = line_breaks
        either = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True))
        self._pattern = re.compile(f"\n{{0,{line_breaks}}}(?:{either})")
        whole = [n * "\n" + text for text in texts for n in range(line_breaks + 1)]
        self._starts = {text[:length] for text in whole for length in range(1, len(text))}
        self.longest = max(map(len, self._starts), default=0)
        """Length of the longest text that may still become the tag."""

    def search(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def match(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.match(text, start)

    def may_begin(self, text: str, start: int) -> bool:
        """Whether all text from ``start`` on may be the beginning of the tag."""
        return start == len(text) or text[start:] in self._starts

    def num_held(self, text: str, start: int) -> int:
        """Length of the text's end that may be the beginning of the tag."""
        for begin in range(max(start, len(text) - self.longest), len(text)):
            if text[begin:] in self._starts:
                return len(text) - begin
        return 0


class ReplyReader(ABC):
    """Parses one response. A format implements ``_read``.

    ``_begin`` is the start of the text that has not been output, ``_at`` the position of the reader; the text
    between them may still turn out to be content.
    """

    is_cut = False
    """Whether the response ended inside its last call."""
    cut_head = ""
    """The beginning of a call, at the response's end, without the name that it calls: content if the model
    ended the response there, nothing if a length limit did."""

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
        """Whether a decision was made only because no more text will come."""
        self._steps = self._read()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Reads the whole response. Text left unread at the end is content."""

    def feed(self, text: str) -> list[ReplyDelta]:
        """Takes the next piece of the response; returns the deltas that have become certain."""
        held = self._text
        self._text = ""
        if self._begin:
            held = held[self._begin :]
            self._at -= self._begin
            self._begin = 0
        held += text  # no other reference exists, so it grows in place: a long wait costs no copies
        self._text = held
        return self._run()

    def finish(self) -> list[ReplyDelta]:
        """Ends the response; returns the deltas that were held back."""
        self._ended = True
        return self._run()

    def _run(self) -> list[ReplyDelta]:
        try:
            next(self._steps)
        except StopIteration:
            self._give_content(self._text[self._begin :])
            self._begin = self._at = len(self._text)
            self._steps = self._pass_on()
        deltas = self._deltas
        self._deltas = []
        return deltas

    def _pass_on(self) -> Steps[None]:
        """Outputs all further text as content."""
        while True:
            self._give_content(self._text[self._begin :])
            self._begin = self._at = len(self._text)
            yield

    # Building blocks for a format's ``_read``.

    def _more(self) -> Steps[bool]:
        """Waits for text; False if no more will come."""
        if self._ended:
            self._ran_out = True
            return False
        yield
        return True

    def _take(self) -> None:
        """Settles what has been read so far."""
        self._begin = self._at

    def _go_back(self, length: int) -> None:
        """Outputs ``length`` characters of the unsettled text as content, and continues reading after
        them."""
        end = self._begin + length
        self._give_content(self._text[self._begin : end])
        self._begin = self._at = end

    @property
    def _length(self) -> int:
        """Length of the text that has been read but not settled."""
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
        """Moves past the tags that follow a call, and white space before them, and settles them; returns the
        last one's text. A response may also end inside such a tag."""
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
        """Returns the next character; empty at the end of the response."""
        while self._at == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def _accept(self, tag: Tag) -> Steps[str]:
        """Moves past a tag at this position and returns its text; empty if there is no tag here."""
        while True:
            found = tag.match(self._text, self._at)
            if found is not None:
                self._at = found.end()
                return found.group()
            if not tag.may_begin(self._text, self._at) or not (yield from self._more()):
                return ""

    def _pass_until(self, tag: Tag, give: Callable[[str], None], *, leaves_head: bool = False) -> Steps[str]:
        """Outputs the text before the next tag and moves past the tag; returns the tag's text, empty if none
        came.

        The tag itself is not settled, since it may still be content. With ``leaves_head``, neither is a
        possible beginning of it at the response's end.
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
        """Moves past the next tag, wherever it is, and returns its text; if none came, returns an empty text
        with everything read."""
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
        """Returns the text of the next tag, wherever it is; empty if none comes. The position does not
        change."""
        length = self._length
        found = yield from self._find(tag)
        self._at = self._begin + length
        return found

    def _num_held(self, tag: Tag) -> int:
        return 0 if self._ended else tag.num_held(self._text, self._at)

    def _read_word(self, chars: re.Pattern[str]) -> Steps[str]:
        """Reads the text at this position that matches; returns an empty text if it is longer than any
        name."""
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
        """Reads up to and including the next tag and returns the text before it; None if none comes within
        the length of a name."""
        offset = self._length
        while True:
            start = self._begin + offset
            found = tag.search(self._text, start)
            if found is not None and found.start() - start <= MAX_NAME_CHARS:
                self._at = found.end()
                return self._text[start : found.start()]
            if len(self._text) - start > MAX_NAME_CHARS + tag.longest or not (yield from self._more()):
                return None

    # Outputs of a format.

    def _give_content(self, text: str) -> None:
        if text:
            self._deltas.append(ContentDelta(text))

    def _begin_call(self, name: str, arguments: str = "") -> None:
        """Begins a call that is certain, and settles what was read of it."""
        self._deltas.append(ToolCallDelta(self._num_calls, self._new_id(name), name, arguments))
        self._num_calls += 1
        self._take()

    def _give_arguments(self, text: str) -> None:
        """Outputs more of the last call's arguments."""
        if text:
            self._deltas.append(ToolCallDelta(self._num_calls - 1, arguments=text))

    def _give_stray(self, text: str) -> None:
        """Outputs text inside the last call that is neither an argument nor markup."""
        if text:
            self._deltas.append(ToolCallDelta(self._num_calls - 1, stray=text))

    def _new_id(self, name: str) -> str:
        return new_call_id()

"""The base of formats whose response is several messages: each has a head that states its kind.

The prompt ends within a head, so the response begins in the middle of one.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

from engine.tool_parsers.base import ReasoningDelta, ReplyDelta, ToolCallDelta
from engine.tool_parsers.parameters import Tool
from engine.tool_parsers.reader import ReplyReader, Steps, Tag
from engine.tool_parsers.tagged_reader import TaggedReader


class MessageReader(TaggedReader):
    """Parses one response, including the reasoning. Subclasses set the tags, and read the message after a
    head."""

    start: str
    """The text that begins a message, in prompts, too."""
    heads_end: tuple[str, ...]
    """Texts that end a head; the message's text follows."""
    head_inside: Tag | None = None
    """Texts that may follow ``start`` in a head, if the prompt has ``start``."""
    head_stops: Tag
    """Ends of heads, and other texts that end a head without an end."""
    message_end: Tag
    next_heads: tuple[str, ...]
    """Those ends of messages that begin the next message."""
    known_in_head: re.Pattern[str]
    """Matches the known parts of a head; other words in it belong to its message."""

    def __init__(self, tools: Sequence[Tool] = (), prompt_tail: str = "") -> None:
        super().__init__(tools)
        self._offered = tools
        self._reads_calls = bool(tools)
        self._has_answered = False
        self._separates = False
        """Whether the next text for the user begins another message."""
        self._space = ""
        """White space in a message of calls: content only if other content follows."""
        begun = prompt_tail.rpartition(self.start)[2] if self.start in prompt_tail else ""
        if begun:  # the prompt has the start of the message that the response continues
            self.feed(begun)

    def _read_calls(self) -> Steps[bool]:
        head = self._unsettled
        if not head.endswith(self.heads_end):
            rest = yield from self._read_until(self.head_stops)
            if rest is None:
                return False
            if not self._unsettled.endswith(self.heads_end):  # the head has no end, so its text is content
                self._give_content(head + rest if self._is_inside(head) else rest)
                self._leave_next_head()
                return True
            head = self._unsettled
        self._take()
        yield from self._read_message(head, self.known_in_head.sub("", head).strip())
        return True

    def _opens_at_once(self) -> Steps[bool]:
        return self.head_inside is not None and bool((yield from self._accept(self.head_inside)))

    def _is_inside(self, head: str) -> bool:
        """Whether a head began with a text and not with a tag."""
        return self.head_inside is not None and head in self.head_inside.texts

    def _leave_next_head(self) -> None:
        """Settles what has been read, except the beginning of the next head."""
        found = next((each for each in self.next_heads if self._unsettled.endswith(each)), "")
        self._at -= len(found)
        self._take()

    @abstractmethod
    def _read_message(self, head: str, unknown: str) -> Steps[None]:
        """Reads the message after a head. ``unknown``: text in the head that is not part of the format."""

    def _pass_reasoning(self, unknown: str) -> Steps[None]:
        self._give_reasoning(unknown)
        yield from self._pass_message(self._give_reasoning)

    def _pass_answer(self, unknown: str) -> Steps[None]:
        self._separates = self._has_answered
        self._give_content(unknown)
        yield from self._pass_message(self._give_content)

    def _pass_calls(self, reader: ReplyReader, begun: str) -> Steps[None]:
        """Lets another reader parse a message of calls. ``begun``: the text that it reads first."""
        self._separates = self._has_answered
        self._space = ""
        first = self._num_calls
        self._give_deltas(reader.feed(begun), first)
        ended = yield from self._pass_message(lambda text: self._give_deltas(reader.feed(text), first))
        self._give_deltas(reader.finish(), first)
        self.is_cut = reader.is_cut and not ended
        if ended:
            self._give_content(reader.cut_head)
        else:
            self.cut_head = reader.cut_head

    def _give_deltas(self, deltas: Iterable[ReplyDelta], first: int) -> None:
        """Outputs another reader's deltas; its first call gets the response's number ``first``."""
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                self._space = ""
                delta.index += first
                self._num_calls = delta.index + 1
                self._deltas.append(delta)
            elif isinstance(delta, ReasoningDelta):
                self._give_reasoning(delta.text)
            else:
                self._give_beside_calls(delta.text)

    def _give_beside_calls(self, text: str) -> None:
        text = self._space + text
        said = text.rstrip()
        self._space = text[len(said) :]
        self._give_content(said)

    def _pass_message(self, give: Callable[[str], None]) -> Steps[bool]:
        """Outputs the text of a message; returns True if it has an end. A head that follows without one is
        left unread."""
        end = yield from self._pass_until(self.message_end, give)
        self._leave_next_head()
        return bool(end)

    def _give_content(self, text: str) -> None:
        """Outputs text for the user; separates messages by an empty line."""
        if self._separates and text:
            super()._give_content("\n\n")
            self._separates = False
        self._has_answered = self._has_answered or bool(text)
        super()._give_content(text)

    def _give_reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(ReasoningDelta(text))

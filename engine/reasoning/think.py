"""Splits a response into a reasoning section and the answer: ``<think>...</think>`` and similar tags.

The opening tag may be in the response, or at the prompt's end, so that the response begins inside
the section. A token that only tool calls have ends the section. A call spelled as plain text inside
the section is reasoning and not a call, unless the section has no closing tag or ends right after
it: a model that acts has ended its reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.tool_parsers.base import (
    ContentDelta,
    ParsedReply,
    PlainParser,
    ReasoningDelta,
    ReplyDelta,
    ReplyParser,
    ToolCallDelta,
)
from engine.tool_parsers.reader import ReplyReader, Steps, Tag

_CONTROL_TEXT = re.compile(r"<[|｜]|\[/?[A-Z_]+\]")
"""What chat templates write between turns."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags that open and close the section."""

    begin: str
    end: str
    assumed: bool = False
    """Whether the response begins inside the section even if neither prompt nor response shows its
    opening tag."""
    make_answer: Callable[[], ReplyParser] = PlainParser
    """Makes the parser of an answer in which no calls are looked for."""

    def open_in(self, prompt_tail: str) -> bool | None:
        """Whether the prompt ends inside a section; None if it ends outside without having closed
        one."""
        _, begin, inside = prompt_tail.rpartition(self.begin)
        if begin and self.end not in inside:
            return True if not _CONTROL_TEXT.search(inside) else None
        return False if prompt_tail.rstrip().endswith(self.end) else None


@dataclass(frozen=True, slots=True)
class CallTags:
    """The parts of a format's calls that may occur in reasoning."""

    ending: tuple[str, ...] = ()
    """Tags that only calls have: they end the section."""
    spelled: tuple[str, ...] = ()
    """Texts that a call may begin with."""


class ThinkSection(ReplyReader):
    """Parses one response: gives the reasoning itself, and the rest to the parser of the answer.

    White space at the section's ends is layout.
    """

    def __init__(
        self,
        tags: ThinkTags,
        make_answer: Callable[[], ReplyParser],
        prompt_tail: str,
        call_tags: CallTags | None = None,
    ) -> None:
        super().__init__()
        self._make_answer = make_answer
        self._answer = make_answer()
        self._stray = _StrayEnd(tags.end)
        self._begin_tag = Tag(tags.begin)
        self._end_tag = Tag(tags.end, line_breaks=2)
        self._calls = call_tags or CallTags()
        self._any_end = Tag(tags.end, *self._calls.ending, *self._calls.spelled, line_breaks=2)
        self._end_text = tags.end
        open_in_prompt = tags.open_in(prompt_tail)
        self._closed = open_in_prompt is False
        self._inside = open_in_prompt or (tags.assumed and not self._closed)

    @property
    def answer_is_cut(self) -> bool | None:
        """Whether the response ended inside its last call; None if the answer's parser cannot say."""
        return getattr(self._answer, "is_cut", None)

    def finish(self) -> list[ReplyDelta]:
        deltas = super().finish()
        deltas += self._stray.left_out_of(self._answer.finish())
        return deltas + self._stray.finish()

    def _read(self) -> Steps[None]:
        if self._closed:
            return
        yield from self._skip_space()
        if not (yield from self._accept(self._begin_tag)) and not self._inside:
            return
        yield from self._skip_space()
        self._take()
        while found := (yield from self._pass_until(self._any_end, self._give_reasoning)):
            tag = found.lstrip("\n")
            if tag == self._end_text:
                yield from self._end_section()
                return
            if tag in self._calls.ending or (yield from self._read_spelled(found, tag)):
                return

    def _end_section(self) -> Steps[None]:
        self._stray.may_come = False
        yield from self._skip_space()
        self._take()

    def _read_spelled(self, found: str, tag: str) -> Steps[bool]:
        """Read what may be a call, up to the end of the reasoning or of the response; True if
        either was reached.

        False if it is no call: then its first tag is reasoning, and what follows is left unread.
        """
        parser, reply = self._make_answer(), ParsedReply()
        deltas: list[ReplyDelta] = []
        num_fed = len(found) - len(tag)
        end: re.Match[str] | None = None
        while end is None:
            start = self._begin + num_fed
            end = self._end_tag.search(self._text, start)
            safe = end.start() if end else len(self._text) - self._num_held_from(start)
            read = parser.feed(self._text[start:safe])
            reply.add(read)
            deltas += read
            num_fed = safe - self._begin
            if _first_is_content(deltas):
                break
            if end is None and not (yield from self._more()):
                break
        if end is None and self._ended and not _first_is_content(deltas):
            read = parser.finish()
            reply.add(read)
            deltas += read
        if end is None and (_first_is_content(deltas) or not reply.calls):
            self._give_reasoning(found)
            self._at = self._begin + len(found)
            self._take()
            return False
        if end is None or _ends_in_whole_call(deltas, reply):
            self._answer = parser
            self._deltas += [
                ReasoningDelta(delta.text) if isinstance(delta, ContentDelta) else delta for delta in deltas
            ]
        else:
            self._give_reasoning(self._text[self._begin : self._begin + num_fed])
        self._at = self._begin + num_fed + (len(end.group()) if end else 0)
        if end is not None:
            yield from self._end_section()
        self._take()
        return True

    def _num_held_from(self, start: int) -> int:
        return 0 if self._ended else self._end_tag.num_held(self._text, start)

    def _give_reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(ReasoningDelta(text))

    def _give_content(self, text: str) -> None:
        """What is not reasoning goes to the parser of the answer."""
        if text:
            self._deltas += self._stray.left_out_of(self._answer.feed(text))


class _StrayEnd:
    """Removes the section's closing tag from the content after a call that ended the section before
    it."""

    def __init__(self, end: str) -> None:
        self._tag = Tag(end, line_breaks=2)
        self._behind_call = False
        self._strips = False
        """Whether the next white space belongs to the tag."""
        self._held = ""
        self.may_come = True

    def left_out_of(self, deltas: list[ReplyDelta]) -> list[ReplyDelta]:
        if not self.may_come and not self._strips:
            return deltas
        kept: list[ReplyDelta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta) and self._behind_call:
                kept += self._content(delta.text)
                continue
            self._behind_call = self._behind_call or isinstance(delta, ToolCallDelta)
            kept += [*self.finish(), delta]
        return kept

    def finish(self) -> list[ReplyDelta]:
        """Give the text that was held back, because it might have been the start of the tag."""
        held, self._held = self._held, ""
        return [ContentDelta(held)] if held else []

    def _content(self, text: str) -> list[ReplyDelta]:
        text = self._held + text
        found = self._tag.search(text, 0) if self.may_come else None
        if found is not None:
            before, text = text[: found.start()], text[found.end() :]
            self.may_come, self._strips, self._held = False, True, ""
            return [*([ContentDelta(before)] if before else []), *self._content(text)]
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        num_held = self._tag.num_held(text, 0) if self.may_come else 0
        given, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return [ContentDelta(given)] if given else []


def _first_is_content(deltas: list[ReplyDelta]) -> bool:
    return bool(deltas) and isinstance(deltas[0], ContentDelta)


def _ends_in_whole_call(deltas: list[ReplyDelta], reply: ParsedReply) -> bool:
    """Whether only white space follows the last of the calls, which is complete."""
    rest = ""
    for delta in deltas:
        rest = rest + delta.text if isinstance(delta, ContentDelta) else ""
    if not reply.calls or rest.strip():
        return False
    try:
        return isinstance(msgspec.json.decode(reply.calls[-1].arguments), dict)
    except (msgspec.DecodeError, RecursionError):
        return False

"""Splits a response into a reasoning section and the answer: ``<think>...</think>`` and similar tags.

The opening tag may be in the response, or at the prompt's end, so that the response begins inside the
section. A call inside the section is a draft, hence reasoning, if more reasoning or an answer follows it. It
counts as a call in two cases. First, if the response ends with it, with or without a closing tag: a model
that acts has ended its reasoning. Second, if it is on separate lines at the end of the section and no other
call follows. If the section is not closed, tokens that only calls have end it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.tool_parsers.arguments import CallArguments
from engine.tool_parsers.base import (
    ContentDelta,
    ParsedReply,
    PlainParser,
    ReasoningDelta,
    ReplyDelta,
    ReplyParser,
)
from engine.tool_parsers.reader import ReplyReader, Steps, Tag

_QUOTES = "`'\""
_CONTROL_TEXT = re.compile(r"<[|｜]|\[/?[A-Z_]+\]")
"""Matches the texts that chat templates write between turns."""


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """The tags that open and close the section."""

    begin: str
    end: str
    assumed: bool = False
    """Whether the response begins inside the section even if neither prompt nor response has its opening
    tag."""
    make_answer: Callable[[], ReplyParser] = PlainParser
    """Makes the parser of an answer that cannot contain calls."""
    bare: str | None = None
    """Another form of the opening tag, only at the response's start, such as the rest of it if the tokenizer
    omits its token."""
    other_ends: tuple[str, ...] = ()
    """Other forms of the closing tag."""
    efforts: tuple[tuple[str, str], ...] = ()
    """Other pairs of tags, for less reasoning, which a prompt may have opened."""

    def opened_by(self, prompt_tail: str) -> ThinkTags:
        """Returns these tags, or the pair that the prompt has opened."""
        for begin, end in self.efforts:
            if begin in prompt_tail:
                return replace(self, begin=begin, end=end)
        return self

    def open_in(self, prompt_tail: str) -> bool | None:
        """Whether the prompt ends inside a section; None if it ends outside without having closed one."""
        _, begin, inside = prompt_tail.rpartition(self.begin)
        if begin and self.end not in inside:
            return True if not _CONTROL_TEXT.search(inside) else None
        return False if prompt_tail.rstrip().endswith(self.end) else None


@dataclass(frozen=True, slots=True)
class CallTags:
    """The parts of a format's calls that may occur in reasoning."""

    ending: tuple[str, ...] = ()
    """Tags that only calls have: text after such a call is an answer if the section does not end there."""
    spelled: tuple[str, ...] = ()
    """Texts that a call may begin with."""


class ThinkSection(ReplyReader):
    """Parses one response: outputs the reasoning itself, and passes the rest to the parser of the answer.

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
        tags = tags.opened_by(prompt_tail)
        ends = (tags.end, *tags.other_ends)
        self._make_answer = make_answer
        self._answer = make_answer()
        self._stray = _StrayEnd(tags.end)
        self._begin_tag = Tag(tags.begin, *(() if tags.bare is None else (tags.bare,)))
        self._end_tag = Tag(*ends, line_breaks=2)
        self._calls = call_tags or CallTags()
        self._any_end = Tag(*ends, *self._calls.ending, *self._calls.spelled, line_breaks=2)
        self._ends = ends
        self._has_thought = False
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
        self.cut_head = getattr(self._answer, "cut_head", "")
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
            if tag in self._ends:
                yield from self._skip_space()
                self._take()
                return
            if (yield from self._read_draft(found, tag)):
                return

    def _read_draft(self, found: str, tag: str) -> Steps[bool]:
        """Reads a possible call, up to the end of the reasoning or of the response; True if either was
        reached.

        False if it is not a call: then its first tag is reasoning, and what follows is left unread.
        """
        draft = _Draft(self._make_answer())
        num_fed = len(found) - len(tag)
        end: re.Match[str] | None = None
        while end is None:
            start = self._begin + num_fed
            end = self._end_tag.search(self._text, start)
            safe = end.start() if end else len(self._text) - self._num_held_from(start)
            draft.add(draft.parser.feed(self._text[start:safe]))
            num_fed = safe - self._begin
            if draft.is_none or (end is None and not (yield from self._more())):
                break
        if end is None and not draft.is_none:
            draft.add(draft.parser.finish())
        if draft.is_none or (end is None and not draft.reply.calls):
            self._give_reasoning(found)
            self._at = self._begin + len(found)
            self._take()
            return False
        self._at = self._begin + num_fed + (len(end.group()) if end else 0)
        yield from self._skip_space()
        if end is None:
            is_made = tag in self._calls.ending or not draft.rest.strip()
        else:
            alone = (found.startswith("\n") or not self._has_thought) and end.group().startswith("\n")
            is_made = draft.ends_in_whole_call and (yield from self._nothing_follows(alone=alone))
        self._end_draft(
            draft, num_fed, is_made=is_made, is_thought=end is not None or tag not in self._calls.ending
        )
        return True

    def _nothing_follows(self, *, alone: bool) -> Steps[bool]:
        """Whether nothing after the section contradicts a call at its end. ``alone``: the call is on separate
        lines."""
        length = self._length
        follows = yield from self._peek()
        is_call = yield from self._accept(Tag(*self._calls.ending, *self._calls.spelled))
        self._at = self._begin + length
        return not follows or (alone and not is_call)

    def _end_draft(self, draft: _Draft, num_read: int, *, is_made: bool, is_thought: bool) -> None:
        """Outputs a draft as the calls that it makes, or as reasoning."""
        if not is_made:
            self._give_reasoning(self._text[self._begin : self._begin + num_read])
        else:
            self._answer = draft.parser
            self._deltas += draft.as_reasoning() if is_thought else draft.as_answer()
        self._take()

    def _num_held_from(self, start: int) -> int:
        return 0 if self._ended else self._end_tag.num_held(self._text, start)

    def _give_reasoning(self, text: str) -> None:
        if text:
            self._has_thought = True
            self._deltas.append(ReasoningDelta(text))

    def _give_content(self, text: str) -> None:
        """Passes text that is not reasoning to the parser of the answer."""
        if text:
            self._deltas += self._stray.left_out_of(self._answer.feed(text))


class _StrayEnd:
    """Removes closing tags of sections from an answer, where they close nothing. A tag in quotes is a mention
    and stays."""

    def __init__(self, end: str) -> None:
        self._tag = Tag(end, line_breaks=2)
        self._said = ""
        """The last character of the answer; empty before any text other than white space."""
        self._strips = False
        """Whether the next white space belongs to the tag."""
        self._held = ""

    def left_out_of(self, deltas: list[ReplyDelta]) -> list[ReplyDelta]:
        kept: list[ReplyDelta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                kept += self._content(delta.text)
            else:
                kept += [*self.finish(), delta]
                self._said = ""
        return kept

    def finish(self) -> list[ReplyDelta]:
        """Outputs the text that was held back because it might be the start of the tag."""
        held = self._held
        self._held = ""
        return self._given(held)

    def _content(self, text: str) -> list[ReplyDelta]:
        text = self._held + text
        self._held = ""
        given: list[ReplyDelta] = []
        while found := self._tag.search(text, 0):
            before = text[: found.start()]
            tag = found.group()
            text = text[found.end() :]
            given += self._given(before)
            if self._said in _QUOTES and self._said:
                given += self._given(tag)
            else:
                self._strips = not self._said
                given += self._given(tag[: len(tag) - len(tag.lstrip("\n"))] if self._said else "")
        num_held = self._tag.num_held(text, 0)
        self._held = text[len(text) - num_held :]
        return given + self._given(text[: len(text) - num_held])

    def _given(self, text: str) -> list[ReplyDelta]:
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        if text and (self._said or not text.isspace()):
            self._said = text[-1]
        return [ContentDelta(text)] if text else []


class _Draft:
    """A possible call inside the section, while it is read."""

    def __init__(self, parser: ReplyParser) -> None:
        self.parser = parser
        self.reply = ParsedReply()
        self._deltas: list[ReplyDelta] = []

    def add(self, deltas: list[ReplyDelta]) -> None:
        self.reply.add(deltas)
        self._deltas += deltas

    @property
    def is_none(self) -> bool:
        """Whether it has turned out not to be a call: text comes first, whatever follows it."""
        return bool(self._deltas) and isinstance(self._deltas[0], ContentDelta)

    @property
    def rest(self) -> str:
        """The text after the last call."""
        rest = ""
        for delta in self._deltas:
            rest = rest + delta.text if isinstance(delta, ContentDelta) else ""
        return rest

    @property
    def ends_in_whole_call(self) -> bool:
        """Whether only white space follows the last of the calls, which is complete."""
        if not self.reply.calls or self.rest.strip():
            return False
        arguments = CallArguments()
        arguments.feed(self.reply.calls[-1].arguments)
        return arguments.is_closed or not arguments.has_begun

    def as_answer(self) -> list[ReplyDelta]:
        return self._deltas

    def as_reasoning(self) -> list[ReplyDelta]:
        """Returns the calls; the text between them is reasoning."""
        return [
            ReasoningDelta(delta.text) if isinstance(delta, ContentDelta) else delta for delta in self._deltas
        ]

"""Base of the formats that write a call's parameters one by one between tags."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence

from engine.tool_parsers.call_object import FENCE, WRAPPER_KEYS, CallObjectReader
from engine.tool_parsers.parameters import (
    STRING,
    ArgumentText,
    Tool,
    Types,
    ValueText,
    value_text,
)
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged_reader import TaggedReader

_FUNCTION_NAME = re.compile(r"[^\s<>{}\[\]\"'=]*+")
_PARAMETER_NAME = re.compile(r"[^<>\"\n]*+")
_LINE_BREAK = Tag("\n")
_TAG_NAME = re.compile(r"[\w:]*+")
_REST_OF_TAG = r"[\w:]*(?:>|<\|sep\|>)"
_TAG_END = Tag(">", "<|sep|>")


class XmlCallReader(TaggedReader, CallObjectReader):
    """Base of formats whose parameters are text between tags, typed by the tools' schemas.

    A call may also have its arguments as one JSON object. Any other text is passed on as written instead of
    the arguments, or in addition to them.
    """

    value_end: Tag
    inside: Tag
    """The tags that may follow a call's name inside it, and signs that its end tag is missing."""
    other_markup: tuple[str, ...] = ()
    """Other tags of the format."""
    own_mark: str | None = None
    """The text that begins every closing tag, in a format whose marks no other text contains: a misspelled
    closing tag then ends a value, too."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._function = ""
        self._arguments = ArgumentText()

    @abstractmethod
    def _shows_missing_end(self, tag: str) -> Steps[bool]:
        """Whether a tag inside a value shows that the value's end tag is missing; the tag has been
        consumed."""

    def _begin_function(self, name: str) -> None:
        self._function = name
        self._arguments = ArgumentText()
        self._begin_call(name)

    def _end_function(self) -> None:
        self._take()
        self._give_arguments(self._arguments.end())
        if self._arguments.has_begun:
            self._give_stray(self._arguments.said_instead)

    def _read_other(self) -> Steps[bool]:
        """Reads what follows if it is not a parameter: the call's end, an object with all arguments, or text
        that does not belong there; False if the call has ended."""
        if (yield from self._ends_here()):
            yield from self._leave_function()
            return False
        if (yield from self._is_body()):
            yield from self._pass_body()
            return not self.is_cut
        return (yield from self._skip_unexpected())

    @abstractmethod
    def _ends_here(self) -> Steps[bool]:
        """Whether the call ends here: its end tag may be consumed, but not a sign that it is missing."""

    def _leave_function(self) -> Steps[None]:
        """Ends the call, whose end was read."""
        self._end_function()
        yield from self._skip_closing()

    def _begins_parameter(self, name_end: Tag) -> Steps[bool]:
        """Whether, after the tag of a parameter inside a value, a parameter begins that the call may have."""
        name = (yield from self._read_word(_PARAMETER_NAME)).strip()
        if not (yield from self._accept(name_end)) or name in self._arguments.names:
            return False
        knows = self._tools.knows_parameters(self._function)
        return not knows or self._tools.types(self._function, name) is not None

    def _read_function_name(self, end: Tag) -> Steps[str | None]:
        """Reads a name and the tag after it, and returns the name; None if it is not a name."""
        yield from self._skip_space()
        name = yield from self._read_word(_FUNCTION_NAME)
        yield from self._skip_space()
        return name if name and (yield from self._accept(end)) else None

    def _read_parameter_name(self, end: Tag) -> Steps[str | None]:
        """Reads a parameter's name in the same way; it may have more kinds of characters."""
        name = (yield from self._read_word(_PARAMETER_NAME)).strip()
        return name if name and (yield from self._accept(end)) else None

    def _is_body(self) -> Steps[bool]:
        """Whether an object, possibly in a fence, is at this position, instead of the first parameter."""
        if self._arguments.has_begun:
            return False
        if (yield from self._accept(FENCE)):
            yield from self._skip_space()
        return (yield from self._peek()) == "{"

    def _pass_body(self) -> Steps[None]:
        """Passes on the object at this position as the call's arguments."""
        self._take()
        self._arguments.has_body = True
        yield from self._pass_object()

    def _skip_unexpected(self) -> Steps[bool]:
        """Moves past text that does not belong in a call, up to text that does; False if the response ends
        before."""
        found = yield from self._find(self.inside)
        if found:
            self._at -= len(found)
        self._arguments.said_instead += self._without_markup(self._unsettled)
        if not found:
            self.is_cut = True
            give = self._give_stray if self._arguments.has_begun else self._give_arguments
            give(self._arguments.said_instead)
        self._take()
        return bool(found)

    def _without_markup(self, text: str) -> str:
        """The text of a call without superfluous or misspelled tags."""
        for tag in (*self.value_end.texts, *self.other_markup):
            text = text.replace(tag, "")
        return text if self.own_mark is None else re.sub(re.escape(self.own_mark) + _REST_OF_TAG, "", text)

    def _pass_value(
        self, parameter: str, types: Types | None = None, *, is_json: bool = False
    ) -> Steps[bool]:
        """Passes on the text before the end tag as a parameter's value; False if the response ends before.
        ``is_json``: the format states that the text is JSON, whatever the schema says."""
        self._take()
        if types is None:
            types = self._tools.types(self._function, parameter)
        pieces: list[str] = []
        value = ValueText(STRING if types is None else types, is_json=is_json)
        wraps = self._may_wrap(parameter)
        if not wraps:
            self._give_arguments(self._arguments.key(parameter))

        def give(text: str) -> None:
            if wraps:
                pieces.append(text)
            else:
                self._give_arguments(value.add(text))

        if not (yield from self._pass_until_end(self.value_end, give)):
            self.is_cut = True
            self._give_arguments("".join(pieces) if wraps else value.held)
            self._give_stray(self._arguments.said_instead)
            return False
        self._give_arguments(self._unwrapped(parameter, "".join(pieces)) if wraps else value.end())
        self._take()
        return True

    def _pass_until_end(self, end: Tag, give: Callable[[str], None]) -> Steps[bool]:
        """Passes on the text up to the end tag, or to a sign that it is missing; False if neither comes."""
        marks = () if self.own_mark is None else (self.own_mark,)
        either = Tag(*end.texts, *self.inside.texts, *marks, line_breaks=1)
        while found := (yield from self._pass_until(either, give)):
            tag = found.lstrip("\n")
            if tag in marks:
                tag = yield from self._whole_tag(tag, end)
                found = self._unsettled
            if tag in end.texts:
                give(found[: max(0, len(found) - len(tag) - end.line_breaks)])
                return True
            if tag in marks:
                if (yield from self._skip_misspelt()):
                    return True
            elif (yield from self._shows_missing_end(tag)):
                self._at = self._begin + len(found) - len(tag)
                return True
            self._at = self._begin + len(found)
            give(found)
            self._take()
        return False

    def _whole_tag(self, mark: str, end: Tag) -> Steps[str]:
        """Moves past a known tag, whose mark was read, and returns it; returns the mark if no known tag
        follows."""
        self._at -= len(mark)
        tag = yield from self._accept(Tag(*end.texts, *self.inside.texts))
        self._at += 0 if tag else len(mark)
        return tag or mark

    def _skip_misspelt(self) -> Steps[bool]:
        """Moves past the rest of a closing tag, whose mark was read, whatever its name; False if there is
        none."""
        length = self._length
        yield from self._read_word(_TAG_NAME)
        if (yield from self._accept(_TAG_END)):
            return True
        self._at = self._begin + length
        return False

    def _may_wrap(self, parameter: str) -> bool:
        """Whether a name is not a parameter's, but the usual name of an object that wraps all parameters."""
        return (
            parameter in WRAPPER_KEYS
            and self._function in self._tools
            and not self._arguments.has_begun
            and self._tools.types(self._function, parameter) is None
        )

    def _unwrapped(self, parameter: str, text: str) -> str:
        try:
            value = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return self._arguments.members(text.strip())
        return self._arguments.key(parameter) + value_text(text, STRING)

    def _skip_line_break(self) -> Steps[None]:
        """Moves past the template's line break before a value, which is not part of it."""
        yield from self._accept(_LINE_BREAK)

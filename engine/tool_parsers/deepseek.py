"""Tool calls in sections of special tokens: DeepSeek V3, R1 and V3.1, and Kimi K2.

V3.1 writes ``name<sep>{...}``; V3 writes ``function<sep>name``, a line break and the arguments fenced as
JSON: the text after the separator shows which. Kimi writes ``functions.name:0<sep>{...}``. A call's own
tokens suffice: the section around it may be missing.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from engine.tool_parsers.call_object import FENCE, CallObjectReader
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged_reader import TaggedReader

DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"
KIMI_SECTION = "<|tool_calls_section_begin|>"

_ANY_KIND = "function"
"""The text that V3 writes before the separator: the call's type."""
_FENCE_END = Tag("```")
_NAME = re.compile(r"[^\s<>{}\[\]\"'`]*+")
_KIMI_NAME = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")
_NUMBERED = re.compile(r"(.+?)[.:_\-#]+\d+")


_PLAMO_NAME = Tag("<|plamo:begin_tool_name:plamo|>")
_PLAMO_NAME_END = Tag("<|plamo:end_tool_name:plamo|>")
_PLAMO_TYPE = Tag("<|plamo:constrain|>")
_PLAMO_MESSAGE = Tag("<|plamo:msg|>")
_PLAMO_END = Tag("<|plamo:end_tool_arguments:plamo|>")


@dataclass(frozen=True, slots=True)
class SectionTags:
    """The tokens of one family."""

    begin: Tag
    call: Tag
    separator: Tag
    call_end: Tag
    end: Tag
    argument_ends: tuple[str, ...] = ()
    """Tokens that end the arguments before the call's end."""


class SectionToolParser(TaggedReader, CallObjectReader):
    """Parses one response; the module's docstring defines a call."""

    tags: SectionTags
    raw_end: Tag

    def __init_subclass__(cls) -> None:
        tags = cls.tags
        cls.opening = Tag(*tags.begin.texts, *tags.call.texts)
        cls.closing = tags.call_end
        cls.raw_end = Tag(*tags.argument_ends, *tags.call_end.texts, *tags.call.texts, *tags.end.texts)

    @property
    def _ends_of_nothing(self) -> Tag:
        return Tag(*self.tags.end.texts, *self.tags.call_end.texts)

    def _read_calls(self) -> Steps[bool]:
        num_before = self._num_calls
        in_section = not self._unsettled.endswith(self.tags.call.texts)
        if not in_section:
            yield from self._read_call()
        while in_section or self._num_calls > num_before:
            length = self._length
            found = yield from self._find_next(in_section)
            if found not in self.tags.call.texts:
                self._at = self._at if found else self._begin + length
                break
            yield from self._read_call()
        return self._num_calls > num_before

    def _find_next(self, in_section: bool) -> Steps[str]:
        """Moves past the next call's token, or that of the section's end, and returns it; empty if none
        follows. Any other text in a section is content."""
        if in_section:
            length = self._length
            found = yield from self._find(Tag(*self.tags.call.texts, *self.tags.end.texts))
            other = self._text[self._begin + length : self._at - len(found)]
            self._aside += "" if other.isspace() else other
            return found
        yield from self._skip_space()
        return (yield from self._accept(self.tags.call)) or (yield from self._accept(self.tags.end))

    def _read_call(self) -> Steps[None]:
        """Reads the call after a call's token; reads nothing if there is no name."""
        length = self._length
        yield from self._skip_space()
        if (yield from self._peek()) in ("{", "`"):
            if (yield from self._read_call_objects()):
                yield from self._skip_closing()
            else:
                self._at = self._begin + length
            return
        name = yield from self._read_name()
        if not name:
            self._at = self._begin + length
            return
        self._begin_call(name)
        if (yield from self._peek()) == "{":
            yield from self._pass_object()
        elif self._ended and self.tags.call_end.may_begin(self._text, self._at):
            self.is_cut = True
            self._at = len(self._text)
        elif not (yield from self._ends_here()):
            yield from self._pass_raw()
        yield from self._skip_closing()

    def _ends_here(self) -> Steps[bool]:
        """Whether the call ends here, without arguments."""
        length = self._length
        yield from self._accept(_FENCE_END)
        yield from self._skip_space()
        assert self.raw_end is not None
        ends = bool((yield from self._accept(self.raw_end)))
        self._at = self._begin + length
        return ends

    def _read_name(self) -> Steps[str]:
        """Reads the function's name and everything before its arguments; empty if it has no name."""
        name = yield from self._read_word(_NAME)
        yield from self._skip_space()
        separated = yield from self._accept(self.tags.separator)
        yield from self._skip_space()
        if separated and name in ("", _ANY_KIND) and (yield from self._peek()) != "{":
            name = (yield from self._read_word(_NAME)) or name
            if self._at == len(self._text):  # the name may continue beyond the part that has arrived
                return ""
            yield from self._skip_space()
        yield from self._accept(FENCE)
        yield from self._skip_space()
        if separated or (yield from self._peek()) == "{":
            return name
        return name if (yield from self._ends_here()) else ""


class DeepSeekToolParser(SectionToolParser):
    """Parses calls of DeepSeek V3, R1 and V3.1."""

    tags = SectionTags(
        begin=Tag(DEEPSEEK_SECTION),
        call=Tag("<｜tool▁call▁begin｜>"),
        separator=Tag("<｜tool▁sep｜>"),
        call_end=Tag("<｜tool▁call▁end｜>"),
        end=Tag("<｜tool▁calls▁end｜>"),
    )


class KimiToolParser(SectionToolParser):
    """Parses calls of Kimi K2, whose template needs the ids that the model wrote: ``functions.name:0``."""

    tags = SectionTags(
        begin=Tag(KIMI_SECTION),
        call=Tag("<|tool_call_begin|>"),
        separator=Tag("<|tool_call_argument_begin|>"),
        call_end=Tag("<|tool_call_end|>"),
        end=Tag("<|tool_calls_section_end|>"),
    )

    _counter = ""
    """The whole id of a call that names no function."""

    def _begin_call(self, name: str, arguments: str = "") -> None:
        self._written_id = f"functions.{name}:{self._counter}" if self._counter else name
        super()._begin_call(self._named(name), arguments)

    def _read_name(self) -> Steps[str]:
        name = yield from super()._read_name()
        self._counter = name if name.isdigit() and name not in self._tools else ""
        return (yield from self._counted(name)) if self._counter else name

    def _counted(self, counter: str) -> Steps[str]:
        """The function for an id that is only a number: the one whose parameters match the arguments."""
        length = self._length
        value = (yield from self._read_value()) if (yield from self._peek()) == "{" else None
        self._at = self._begin + length
        try:
            given = set(json.loads(value or "{}", strict=False))
        except (ValueError, RecursionError):
            return counter
        names = [
            name
            for name in self._tools.names
            if all(self._tools.types(name, key) is not None for key in given)
        ]
        return names[0] if len(names) == 1 else counter

    def _named(self, written: str) -> str:
        """The function for an id. Some models number calls differently from the format's definition."""
        found = _KIMI_NAME.fullmatch(written)
        name = found.group(1) if found else written
        numbered = None if name in self._tools else _NUMBERED.fullmatch(name)
        return numbered.group(1) if numbered and numbered.group(1) in self._tools else name

    def _new_id(self, name: str) -> str:
        return self._written_id


class PlamoToolParser(SectionToolParser):
    """Parses calls of PLaMo 3, which writes name and arguments in separate tags."""

    tags = SectionTags(
        begin=Tag("<|plamo:begin_tool_requests:plamo|>"),
        call=Tag("<|plamo:begin_tool_request:plamo|>"),
        separator=Tag("<|plamo:begin_tool_arguments:plamo|>"),
        call_end=Tag("<|plamo:end_tool_request:plamo|>"),
        end=Tag("<|plamo:end_tool_requests:plamo|>"),
        argument_ends=_PLAMO_END.texts,
    )
    _type = ""
    """The type of the arguments that the call states."""

    def _read_name(self) -> Steps[str]:
        yield from self._accept(_PLAMO_NAME)
        name = yield from self._read_word(_NAME)
        yield from self._accept(_PLAMO_NAME_END)
        yield from self._skip_space()
        separated = yield from self._accept(self.tags.separator)
        self._type = ""
        if (yield from self._accept(_PLAMO_TYPE)):
            self._type = (yield from self._read_until(_PLAMO_MESSAGE)) or ""
        yield from self._skip_space()
        return name if separated or (yield from self._ends_here()) else ""

    def _begin_call(self, name: str, arguments: str = "") -> None:
        super()._begin_call(name, arguments)
        self._give_stray(self._type.strip().removeprefix("json"))

    def _skip_closing(self) -> Steps[None]:
        yield from self._skip_layout(_PLAMO_END)
        yield from super()._skip_closing()

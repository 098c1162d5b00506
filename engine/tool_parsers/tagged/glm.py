"""Tool calls of GLM 4.5 to 4.7: ``<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>``, and
of Hunyuan 3 and 4.

The earlier versions have a line break between the tags. A call is certain once its first parameter or its end
begins.
"""

from __future__ import annotations

import re

from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.xml_call import XmlCallReader

OPEN = "<tool_call>"
KEY = "<arg_key>"
VALUE = "<arg_value>"
VALUE_END = "</arg_value>"
CLOSE = "</tool_call>"

_FUNCTION_NAME = re.compile(r"[^\s<>{}\[\]\"'=]*+")
_KEY_NAME = re.compile(r"[^<>\"\n]*+")


class GlmToolParser(XmlCallReader):
    """Parses one response; the module's docstring defines a call."""

    opening = Tag(OPEN, line_breaks=1)
    closing = Tag(CLOSE)
    raw_end = Tag(OPEN, CLOSE)
    value_end = Tag(VALUE_END)
    call_end = Tag(CLOSE, OPEN)
    """Tags that end a call, whether they belong to it or to the next one."""
    inside = Tag(KEY, *call_end.texts)
    key = Tag(KEY)
    key_end = Tag("</arg_key>")
    value = Tag(VALUE)
    other_markup: tuple[str, ...] = (KEY, "</arg_key>", VALUE)
    name_end = Tag(KEY, CLOSE)
    """Tags that show that the name was a function's; they are left unread."""

    def _read_calls(self) -> Steps[bool]:
        yield from self._skip_space()
        if (yield from self._peek()) in ("{", "[", "`"):
            if not (yield from self._read_call_objects()):
                return False
            yield from self._skip_closing()
            return True
        if not (yield from self._read_head()):
            return False
        while (yield from self._read_parameter()):
            pass
        return True

    def _read_head(self) -> Steps[bool]:
        """Reads the function's name; the tag that shows that it is one is left unread."""
        name = yield from self._read_word(_FUNCTION_NAME)
        yield from self._skip_space()
        length = self._length
        shows = yield from self._accept(self.name_end)
        self._at = self._begin + length
        shows = shows or (yield from self._peek_bare_key())
        self._at = self._begin + length
        if not name or not (shows or (name in self._tools and (yield from self._is_body()))):
            return False
        self._at = self._begin + length
        self._begin_function(name)
        return True

    def _read_parameter(self) -> Steps[bool]:
        """Reads one parameter, or text in its place; False after the last one, if the call has ended."""
        yield from self._skip_space()
        if (yield from self._accept(self.key)) or (yield from self._peek_bare_key()):
            name = yield from self._read_key()
            if name is None:
                return (yield from self._skip_unexpected())
            return (yield from self._pass_value(name))
        return (yield from self._read_other())

    def _peek_bare_key(self) -> Steps[str]:
        """The name of a parameter whose opening tag is missing; empty if none is here. The position does not
        change."""
        length = self._length
        name = (yield from self._read_word(_KEY_NAME)).strip()
        ended = yield from self._accept(self.key_end)
        self._at = self._begin + length
        return name if ended else ""

    def _ends_here(self) -> Steps[bool]:
        length = self._length
        ends = yield from self._accept(self.call_end)
        self._at = self._begin + length
        return bool(ends)

    def _read_key(self) -> Steps[str | None]:
        """Reads a parameter's name, and the tag that begins its value; either of the two tags may be
        missing."""
        name = (yield from self._read_word(_KEY_NAME)).strip()
        ended = yield from self._accept(self.key_end)
        yield from self._skip_space()
        yield from self._skip_type()
        if not (yield from self._accept(self.value)) and (not ended or (yield from self._has_no_value())):
            return None
        return name or None

    def _skip_type(self) -> Steps[None]:
        """Moves past the type of a value, in formats that write it."""
        yield from ()

    def _has_no_value(self) -> Steps[bool]:
        length = self._length
        follows = yield from self._accept(self.inside)
        self._at = self._begin + length
        return bool(follows)

    def _shows_missing_end(self, tag: str) -> Steps[bool]:
        if tag in self.key.texts:
            name = yield from self._read_key()
            return (
                name is not None
                and name not in self._arguments.names
                and (
                    not self._tools.knows_parameters(self._function)
                    or self._tools.types(self._function, name) is not None
                )
            )
        # Text may contain such a tag, too: then the value's own end is still to come.
        following = Tag(*self.value_end.texts, *self.key.texts, *self.opening.texts)
        is_end = tag in self.closing.texts
        return is_end and (yield from self._look_ahead(following)) not in self.value_end.texts


def _both(*texts: str) -> tuple[str, ...]:
    """The tags, and their variants with the place of publication, which some model folders use."""
    return (*texts, *(f"{text[:-1]}:opensource>" for text in texts))


class HyToolParser(GlmToolParser):
    """Parses calls of Hunyuan 3: GLM's format in a section, with ``<tool_sep>`` after the name; of 4 without
    it."""

    section, section_end = Tag(*_both("<tool_calls>")), Tag(*_both("</tool_calls>"))
    call = Tag(*_both(OPEN))
    separator = Tag(*_both("<tool_sep>"))
    opening = Tag(*section.texts, *call.texts, line_breaks=1)
    closing = Tag(*_both(CLOSE))
    raw_end = Tag(*call.texts, *closing.texts, *section_end.texts)
    value_end = Tag(*_both(VALUE_END))
    key, key_end, value = Tag(*_both(KEY)), Tag(*_both("</arg_key>")), Tag(*_both(VALUE))
    other_markup = (*key.texts, *key_end.texts, *value.texts)
    call_end = Tag(*raw_end.texts, *section.texts)
    inside = Tag(*key.texts, *call_end.texts)
    name_end = Tag(*separator.texts, *key.texts, *closing.texts)

    def _read_calls(self) -> Steps[bool]:
        if self._unsettled.endswith(self.section.texts):
            yield from self._skip_space()
            yield from self._accept(self.call)
        if not (yield from super()._read_calls()):
            return False
        yield from self._skip_layout(self.section_end)
        return True

    def _read_parameter(self) -> Steps[bool]:
        yield from self._skip_space()
        if (yield from self._accept(self.separator)):
            self._take()
        return (yield from super()._read_parameter())


class HorizonToolParser(HyToolParser):
    """Parses calls of K2 Horizon: Hunyuan's format with other names, and the type of a value between key and
    value."""

    section = Tag("<ifm|tool_calls>")
    section_end = Tag("</ifm|tool_calls>")
    call = Tag("<ifm|tool_call>")
    opening = Tag(*section.texts, *call.texts, line_breaks=1)
    closing = Tag("</ifm|tool_call>")
    raw_end = Tag(*call.texts, *closing.texts, *section_end.texts)
    value_end = Tag("</ifm|arg_value>")
    key = Tag("<ifm|arg_key>")
    key_end = Tag("</ifm|arg_key>")
    value = Tag("<ifm|arg_value>")
    type = Tag("<ifm|arg_type>")
    type_end = Tag("</ifm|arg_type>")
    other_markup = (*key.texts, *key_end.texts, *value.texts)
    call_end = Tag(*raw_end.texts, *section.texts)
    inside = Tag(*key.texts, *call_end.texts)
    name_end = Tag(*key.texts, *closing.texts)

    def _skip_type(self) -> Steps[None]:
        if (yield from self._accept(self.type)):
            yield from self._read_until(self.type_end)
            yield from self._skip_space()


class SolarToolParser(GlmToolParser):
    """Parses calls of Solar Open 2: a key ends where its value begins."""

    opening = Tag("<|tool_call:start|>", line_breaks=1)
    closing = Tag("<|tool_call:end|>")
    raw_end = Tag(*opening.texts, *closing.texts)
    value_end = Tag("<|tool_arg:end|>")
    call_end = Tag(*closing.texts, *opening.texts)
    key = Tag("<|tool_arg:start|>")
    value = Tag("<|tool_arg:value|>")
    key_end = value
    inside = Tag(*key.texts, *call_end.texts)
    other_markup = (*key.texts, *value.texts)
    name_end = Tag(*key.texts, *closing.texts)

    def _read_key(self) -> Steps[str | None]:
        name = (yield from self._read_word(_KEY_NAME)).strip()
        return name or None if (yield from self._accept(self.value)) else None

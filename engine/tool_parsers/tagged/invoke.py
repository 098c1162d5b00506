"""Formats that write a call as an element with a name, and its parameters as elements inside it: ``<invoke
name="f"><parameter name="k">v</parameter></invoke>``.

DeepSeek V3.2, MiniMax M2 and Step 3 differ in their tags. Each call may be in a section, whose tags may be
missing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from engine.tool_parsers.parameters import Types
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.xml_call import XmlCallReader

_CDATA = Tag("<![CDATA[")
_CDATA_END = Tag("]]>")
_BETWEEN_CALLS = re.compile(r"function|<｜tool_sep｜>|<｜tool_call_(?:begin|end)｜>")
"""Matches text that Step 3 writes around each call of a section."""


@dataclass(frozen=True)
class InvokeTags:
    """The tags of one family."""

    sections: tuple[str, ...]
    section_ends: tuple[str, ...]
    invoke: str
    invoke_end: str
    parameter: str
    parameter_end: str
    name_ends: tuple[str, ...] = ('">',)
    """Texts that may follow the name of a parameter."""
    unique: bool = False
    """Whether the tags are tokens that no other text contains."""
    line_breaks: int = 2
    """Number of line breaks that the template writes before a section."""
    call_end: str | None = None
    """The tag that ends a call after its element."""
    layout: tuple[str, ...] = ()
    """Other tags, which are not content."""
    mark: str | None = None
    """The text that begins every closing tag, if only closing tags begin with it."""
    opening: Tag = field(init=False)
    any_section_end: Tag = field(init=False)
    inside: Tag = field(init=False)

    def __post_init__(self) -> None:
        opening = Tag(*self.sections, self.invoke, *self.layout, line_breaks=self.line_breaks)
        object.__setattr__(self, "opening", opening)
        object.__setattr__(self, "any_section_end", Tag(*self.section_ends))
        inside = Tag(self.parameter, self.invoke_end, self.invoke, *self.section_ends)
        object.__setattr__(self, "inside", inside)


class InvokeToolParser(XmlCallReader):
    """Parses one response; the module's docstring defines a call."""

    tags: InvokeTags

    def __init_subclass__(cls) -> None:
        cls.opening = cls.tags.opening
        cls.closing = cls.tags.any_section_end
        cls.value_end = Tag(cls.tags.parameter_end)
        cls.inside = cls.tags.inside
        cls.own_mark = cls.tags.mark

    def _read_calls(self) -> Steps[bool]:
        if self._unsettled.endswith(self.tags.layout):
            return True
        num_before = self._num_calls
        in_section = not self._unsettled.endswith(self.tags.invoke)
        if not in_section:
            yield from self._read_invoke()
        elif (yield from self._read_objects()):
            return True
        while in_section or self._num_calls > num_before:
            found = yield from self._find_next(in_section)
            if found != self.tags.invoke:
                break
            yield from self._read_invoke()
        return self._num_calls > num_before

    def _read_objects(self) -> Steps[bool]:
        """Reads calls that a section contains as JSON; False if it contains none."""
        length = self._length
        yield from self._skip_space()
        if (yield from self._peek()) in ("{", "[") and (yield from self._read_call_objects()):
            yield from self._skip_closing()
            return True
        self._at = self._begin + length
        return False

    def _find_next(self, in_section: bool) -> Steps[str]:
        """Moves past the start of the next call or the end of the section, and returns that tag; empty if
        none follows. Other text in a section is content, except text that only announces the call again."""
        either = Tag(self.tags.invoke, *self.tags.section_ends)
        if in_section and (found := (yield from self._look_ahead(either))):
            length = self._length
            yield from self._find(either)
            self._set_aside(self._text[self._begin + length : self._at - len(found)])
            return found
        if self.tags.call_end is not None and self._num_calls:
            yield from self._skip_layout(Tag(self.tags.call_end))
        length = self._length
        yield from self._skip_space()
        found = "" if in_section else (yield from self._accept(either))
        self._at = self._at if found else self._begin + length
        return found

    def _set_aside(self, text: str) -> None:
        """Keeps text in a section that is not a call."""
        if _BETWEEN_CALLS.sub("", self._without_markup(text)).strip():
            self._aside += text.strip()

    def _read_invoke(self) -> Steps[None]:
        """Reads the call after its opening tag; reads nothing if there is no name."""
        length = self._length
        name = yield from self._read_invoked()
        if name is None:
            self._at = self._begin + length
        else:
            self._begin_function(name)
            while (yield from self._read_parameter()):
                pass

    def _read_invoked(self) -> Steps[str | None]:
        """Reads the function's name and the tag that ends it."""
        return (yield from self._read_function_name(Tag('">')))

    def _read_parameter(self) -> Steps[bool]:
        """Reads one parameter, or text in its place; False after the last one, if the call has ended."""
        yield from self._skip_space()
        if (yield from self._accept(Tag(self.tags.parameter))):
            name = yield from self._read_parameter_name(Tag(*self.tags.name_ends))
            if name is None:
                return (yield from self._skip_unexpected())
            return (yield from self._pass_value(name, self._types(name), is_json=self._is_json()))
        return (yield from self._read_other())

    def _leave_function(self) -> Steps[None]:
        """Ends the call; text after the element is read elsewhere."""
        self._end_function()
        yield from ()

    def _ends_here(self) -> Steps[bool]:
        """Whether the call ends here: its end tag is consumed, but not a sign that it is missing."""
        if (yield from self._accept(Tag(self.tags.invoke_end))):
            return True
        length = self._length
        ends = yield from self._accept(Tag(self.tags.invoke, *self.tags.section_ends))
        self._at = self._begin + length
        return bool(ends)

    def _is_json(self) -> bool:
        """Whether the tag that was read last states that its value is JSON."""
        return False

    def _types(self, name: str) -> Types | None:
        """The possible types of a value."""
        return self._tools.types(self._function, name)

    def _shows_missing_end(self, tag: str) -> Steps[bool]:
        if self.tags.unique:
            return True
        if tag == self.tags.parameter:
            return (yield from self._begins_parameter(Tag(*self.tags.name_ends)))
        if tag == self.tags.invoke:
            return False
        # Text may contain such tags, too: then the value's own end is still to come.
        following = Tag(self.tags.parameter_end, self.tags.parameter, self.tags.invoke)
        return (yield from self._look_ahead(following)) != self.tags.parameter_end


class MiniMaxToolParser(InvokeToolParser):
    """Parses calls of MiniMax M2 to M2.5."""

    tags = InvokeTags(
        sections=("<minimax:tool_call>",),
        section_ends=("</minimax:tool_call>",),
        invoke='<invoke name="',
        invoke_end="</invoke>",
        parameter='<parameter name="',
        parameter_end="</parameter>",
    )


class DotsToolParser(InvokeToolParser):
    """Parses calls of dots.1: MiniMax's format in another section."""

    tags = replace(
        MiniMaxToolParser.tags, sections=("<dots_function_call>",), section_ends=("</dots_function_call>",)
    )


class MiniCpmToolParser(InvokeToolParser):
    """Parses calls of MiniCPM 5: ``<function name="f"><param name="k">v</param></function>``; a value may be
    in CDATA, and the parameters in ``<arguments>``."""

    tags = InvokeTags(
        sections=("<function_calls>",),
        section_ends=("</function_calls>",),
        invoke='<function name="',
        invoke_end="</function>",
        parameter='<param name="',
        parameter_end="</param>",
    )
    other_markup = ("<arguments>", "</arguments>")

    def _pass_value(
        self, parameter: str, types: Types | None = None, *, is_json: bool = False
    ) -> Steps[bool]:
        quoted = yield from self._accept(_CDATA)
        self.value_end = _CDATA_END if quoted else Tag(self.tags.parameter_end)
        whole = yield from super()._pass_value(parameter, types, is_json=is_json)
        if quoted:
            yield from self._accept(Tag(self.tags.parameter_end))
        return whole


class StepToolParser(InvokeToolParser):
    """Parses calls of Step 3, which repeats the kind of each call before it; that text is discarded."""

    tags = InvokeTags(
        sections=("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>"),
        section_ends=("<｜tool_calls_end｜>",),
        invoke='<steptml:invoke name="',
        invoke_end="</steptml:invoke>",
        parameter='<steptml:parameter name="',
        parameter_end="</steptml:parameter>",
        unique=True,
        call_end="<｜tool_call_end｜>",
        mark="</steptml:",
    )

"""Tool calls of DeepSeek V3.2: a section of ``<｜DSML｜invoke name="f">`` elements with typed parameters.

Each parameter is marked as a string or not: ``<｜DSML｜parameter name="k" string="true">v`` and so
on. The tool's schema has precedence. The section's tags may be missing.
"""

from __future__ import annotations

from engine.tool_parsers.parameters import STRING, Types
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.xml_call import XmlCallReader

MARK = "｜DSML｜"
SECTIONS = (f"<{MARK}function_calls>", f"<{MARK}tool_calls>")
"""The second one came with V4."""
INVOKE = f'<{MARK}invoke name="'

_SECTION_ENDS = (f"</{MARK}function_calls>", f"</{MARK}tool_calls>")
_INVOKE = Tag(INVOKE)
_NEXT = Tag(INVOKE, *_SECTION_ENDS)
_INVOKE_NAME_END = Tag('">')
_PARAMETER = Tag(f'<{MARK}parameter name="')
_STRING, _NO_STRING = '" string="true">', '" string="false">'
_UNTYPED = '">'
_PARAMETER_NAME_END = Tag(_STRING, _NO_STRING, _UNTYPED)
_INVOKE_END = Tag(f"</{MARK}invoke>")
_SECTION_END = Tag(*_SECTION_ENDS)

_IS_JSON: Types = frozenset({"number", "integer", "boolean", "object", "array", "null"})


class DsmlToolParser(XmlCallReader):
    """Parses one response; see the module's text for what is a call."""

    opening = Tag(*SECTIONS, INVOKE, line_breaks=2)
    closing = _SECTION_END
    value_end = Tag(f"</{MARK}parameter>")
    inside = Tag(*_PARAMETER.texts, *_INVOKE_END.texts, INVOKE, *_SECTION_ENDS)

    def _read_calls(self) -> Steps[bool]:
        num_before = self._num_calls
        in_section = not self._unsettled.endswith(INVOKE)
        if not in_section:
            yield from self._read_invoke()
        while in_section or self._num_calls > num_before:
            length = self._length
            found = yield from self._find_next(in_section)
            if found != INVOKE:
                self._at = self._at if found else self._begin + length
                break
            yield from self._read_invoke()
        return self._num_calls > num_before

    def _find_next(self, in_section: bool) -> Steps[str]:
        """Move past what begins the next call, or ends the section, and return it; empty if none
        comes. Any other text in a section is discarded."""
        if in_section:
            return (yield from self._find(_NEXT))
        yield from self._skip_space()
        return (yield from self._accept(_INVOKE)) or (yield from self._accept(_SECTION_END))

    def _read_invoke(self) -> Steps[None]:
        """After what begins a call: read the call; where there is no name, nothing is read."""
        name = yield from self._read_function_name(_INVOKE_NAME_END)
        if name is not None:
            self._begin_function(name)
            while (yield from self._read_parameter()):
                pass

    def _read_parameter(self) -> Steps[bool]:
        """Read one parameter, or what is in its place; False after the last one, where the call has
        ended."""
        yield from self._skip_space()
        if (yield from self._accept(_PARAMETER)):
            name = yield from self._read_parameter_name(_PARAMETER_NAME_END)
            if name is None:
                return (yield from self._skip_unexpected())
            return (yield from self._pass_value(name, self._types(name)))
        if (yield from self._ends_here()):
            self._end_function()
            return False
        if (yield from self._is_body()):
            yield from self._pass_body()
            return not self.is_cut
        return (yield from self._skip_unexpected())

    def _ends_here(self) -> Steps[bool]:
        """Whether the call ends here: its end tag is consumed, a sign that it is missing is not."""
        if (yield from self._accept(_INVOKE_END)):
            return True
        length = self._length
        ends = yield from self._accept(_NEXT)
        self._at = self._begin + length
        return bool(ends)

    def _types(self, name: str) -> Types | None:
        """The possible types of a value: by its tag where the schema allows both, else by the schema."""
        tag, known = self._unsettled, self._tools.types(self._function, name)
        if tag.endswith(_STRING):
            return STRING if not known or "string" in known else known
        if tag.endswith(_NO_STRING):
            return (known - STRING or STRING) if known else _IS_JSON
        return known

    def _shows_missing_end(self, tag: str) -> Steps[bool]:
        """Ordinary text never contains the mark."""
        yield from ()
        return True

"""Tool calls of Qwen3-Coder: ``<tool_call><function=f><parameter=k>v</parameter></function></tool_call>``.

A call is certain once its function's name is closed. Some responses omit ``<tool_call>``: then the function
must be one of the tools. A value ends at the first ``</parameter>``, or at a sign that this is missing.
"""

from __future__ import annotations

from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.xml_call import XmlCallReader

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
PARAMETER = "<parameter="
VALUE_END = "</parameter>"

_FUNCTION = Tag(FUNCTION)
_PARAMETER = Tag(PARAMETER)
_NAME_END = Tag(">")
_FUNCTION_END = Tag("</function>")
_CLOSE = Tag(CLOSE)
_AFTER_MISSING_END = Tag(VALUE_END, PARAMETER, FUNCTION, OPEN)


class Qwen3CoderToolParser(XmlCallReader):
    """Parses one response; the module's docstring defines a call."""

    opening = Tag(OPEN, FUNCTION, line_breaks=2)
    closing = _CLOSE
    raw_end = Tag(OPEN, CLOSE)
    value_end = Tag(VALUE_END, line_breaks=1)
    inside = Tag(PARAMETER, "</function>", CLOSE, FUNCTION, OPEN)

    def _read_calls(self) -> Steps[bool]:
        announced = not self._unsettled.endswith(FUNCTION)
        if announced:
            yield from self._skip_space()
            if (yield from self._peek()) in ("{", "[", "`"):
                return (yield from self._read_json_calls())
            if not (yield from self._accept(_FUNCTION)):
                return False
        name = yield from self._read_function_name(_NAME_END)
        if name is None or not (announced or name in self._tools):
            return False
        self._begin_function(name)
        while (yield from self._read_parameter()):
            pass
        return True

    def _read_json_calls(self) -> Steps[bool]:
        if not (yield from self._read_call_objects()):
            return False
        yield from self._skip_closing()
        return True

    def _read_parameter(self) -> Steps[bool]:
        """Reads one parameter, or text in its place; False after the last one, if the call has ended."""
        yield from self._skip_space()
        if (yield from self._accept(_PARAMETER)):
            name = yield from self._read_parameter_name(_NAME_END)
            if name is None:
                return (yield from self._skip_unexpected())
            yield from self._skip_line_break()
            return (yield from self._pass_value(name))
        return (yield from self._read_other())

    def _ends_here(self) -> Steps[bool]:
        """Whether the function ends here: its end tag is consumed, but not a sign that it is missing."""
        if (yield from self._accept(_FUNCTION_END)):
            return True
        length = self._length
        ends = (yield from self._accept(self.closing)) or (yield from self._accept(self.opening))
        self._at = self._begin + length
        return bool(ends)

    def _shows_missing_end(self, tag: str) -> Steps[bool]:
        if tag == PARAMETER:
            return (yield from self._begins_parameter(_NAME_END))
        if tag in (FUNCTION, OPEN):
            return False
        # Text may contain such tags, too: then the value's own end is still to come.
        return (yield from self._look_ahead(_AFTER_MISSING_END)) != VALUE_END


class MimoToolParser(Qwen3CoderToolParser):
    """Parses calls of MiMo, whose values are not on separate lines: line breaks belong to them."""

    value_end = Tag(VALUE_END)

    def _skip_line_break(self) -> Steps[None]:
        yield from ()


class SeedToolParser(MimoToolParser):
    """Parses calls of Seed-OSS, which has other tags around calls."""

    opening = Tag("<seed:tool_call>", FUNCTION, line_breaks=2)
    closing = Tag("</seed:tool_call>")
    raw_end = Tag("<seed:tool_call>", "</seed:tool_call>")
    inside = Tag(PARAMETER, "</function>", "</seed:tool_call>", FUNCTION, "<seed:tool_call>")

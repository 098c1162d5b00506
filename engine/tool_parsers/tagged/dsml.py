"""Tool calls of DeepSeek V3.2: a section of ``<｜DSML｜invoke name="f">`` elements with typed parameters.

Each parameter is marked as a string or not, as in ``<｜DSML｜parameter name="k" string="true">v``. The tool's
schema has precedence.
"""

from __future__ import annotations

from engine.tool_parsers.parameters import STRING, Types
from engine.tool_parsers.tagged.invoke import InvokeTags, InvokeToolParser

MARK = "｜DSML｜"
GCML_MARK = "｜GCML｜"
SECTIONS = (f"<{MARK}function_calls>", f"<{MARK}tool_calls>")
"""The second one is used since V4."""
INVOKE = f'<{MARK}invoke name="'

_STRING = '" string="true">'
_NO_STRING = '" string="false">'
_JSON_TYPES: Types = frozenset({"number", "integer", "boolean", "object", "array", "null"})


def _tags(mark: str, *sections: str) -> InvokeTags:
    """The tags of one version, all of which begin with its mark."""
    return InvokeTags(
        sections=tuple(f"<{mark}{section}>" for section in sections),
        section_ends=tuple(f"</{mark}{section}>" for section in sections),
        invoke=f'<{mark}invoke name="',
        invoke_end=f"</{mark}invoke>",
        parameter=f'<{mark}parameter name="',
        parameter_end=f"</{mark}parameter>",
        name_ends=(_STRING, _NO_STRING, '">'),
        unique=True,
        mark=f"</{mark}",
    )


class DsmlToolParser(InvokeToolParser):
    """Parses one response; the module's docstring defines a call."""

    tags = _tags(MARK, "function_calls", "tool_calls")

    def _is_json(self) -> bool:
        return self._unsettled.endswith(_NO_STRING)

    def _types(self, name: str) -> Types | None:
        """The possible types of a value: from its tag if the schema allows both, else from the schema."""
        tag = self._unsettled
        known = self._tools.types(self._function, name)
        if tag.endswith(_STRING):
            return STRING if not known or "string" in known else known
        if tag.endswith(_NO_STRING):
            return (known - STRING or STRING) if known else _JSON_TYPES
        return known


class Dsml41ToolParser(DsmlToolParser):
    """Parses calls of DeepSeek V4.1, with a space after the mark of each tag."""

    tags = _tags(f"{MARK} ", "calls")


class GcmlToolParser(DsmlToolParser):
    """Parses calls of GigaChat 3.5: the same format with another mark; a value is text unless its tag states
    otherwise."""

    tags = _tags(GCML_MARK, "tool_calls")

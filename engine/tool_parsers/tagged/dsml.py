"""Tool calls of DeepSeek V3.2: a section of ``<｜DSML｜invoke name="f">`` elements with typed parameters.

Each parameter is marked as a string or not: ``<｜DSML｜parameter name="k" string="true">v`` and so
on. The tool's schema has precedence.
"""

from __future__ import annotations

from engine.tool_parsers.parameters import STRING, Types
from engine.tool_parsers.tagged.invoke import InvokeTags, InvokeToolParser

MARK = "｜DSML｜"
GCML_MARK = "｜GCML｜"
SECTIONS = (f"<{MARK}function_calls>", f"<{MARK}tool_calls>")
"""The second one came with V4."""
INVOKE = f'<{MARK}invoke name="'

_STRING, _NO_STRING = '" string="true">', '" string="false">'
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
    """Parses one response; see the module's text for what is a call."""

    tags = _tags(MARK, "function_calls", "tool_calls")

    def _is_json(self) -> bool:
        return self._unsettled.endswith(_NO_STRING)

    def _types(self, name: str) -> Types | None:
        """The possible types of a value: by its tag where the schema allows both, else by the schema."""
        tag, known = self._unsettled, self._tools.types(self._function, name)
        if tag.endswith(_STRING):
            return STRING if not known or "string" in known else known
        if tag.endswith(_NO_STRING):
            return (known - STRING or STRING) if known else _JSON_TYPES
        return known


class Dsml41ToolParser(DsmlToolParser):
    """DeepSeek V4.1, with a space behind the mark of each tag."""

    tags = _tags(f"{MARK} ", "calls")


class GcmlToolParser(DsmlToolParser):
    """GigaChat 3.5: the same with a mark of its own; a value is text unless its tag says otherwise."""

    tags = _tags(GCML_MARK, "tool_calls")

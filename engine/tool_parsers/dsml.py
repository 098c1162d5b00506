"""Tool calls of DeepSeek V3.2: a section of ``<｜DSML｜invoke name="f">`` elements with typed parameters.

Each parameter is marked as a string or not: ``<｜DSML｜parameter name="k" string="true">v`` and so
on. The tool's schema has precedence.
"""

from __future__ import annotations

from engine.tool_parsers.parameters import STRING, Types
from engine.tool_parsers.tagged.invoke import InvokeTags, InvokeToolParser

MARK = "｜DSML｜"
SECTIONS = (f"<{MARK}function_calls>", f"<{MARK}tool_calls>")
"""The second one came with V4."""
INVOKE = f'<{MARK}invoke name="'

_STRING, _NO_STRING = '" string="true">', '" string="false">'
_IS_JSON: Types = frozenset({"number", "integer", "boolean", "object", "array", "null"})


class DsmlToolParser(InvokeToolParser):
    """Parses one response; see the module's text for what is a call."""

    tags = InvokeTags(
        sections=SECTIONS,
        section_ends=(f"</{MARK}function_calls>", f"</{MARK}tool_calls>"),
        invoke=INVOKE,
        invoke_end=f"</{MARK}invoke>",
        parameter=f'<{MARK}parameter name="',
        parameter_end=f"</{MARK}parameter>",
        name_ends=(_STRING, _NO_STRING, '">'),
        unique=True,
    )

    def _types(self, name: str) -> Types | None:
        """The possible types of a value: by its tag where the schema allows both, else by the schema."""
        tag, known = self._unsettled, self._tools.types(self._function, name)
        if tag.endswith(_STRING):
            return STRING if not known or "string" in known else known
        if tag.endswith(_NO_STRING):
            return (known - STRING or STRING) if known else _IS_JSON
        return known

"""Tool calls of Kimi K3: elements of tokens, ``<|open|>call tool="f" index="1"<|sep|>`` and so on.

A section ``tools`` contains them; each argument states its type. The answer before it is in a section
``response``, whose tags are not content.
"""

from __future__ import annotations

import re

from engine.tool_parsers.parameters import STRING, Types
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged.invoke import InvokeTags, InvokeToolParser
from engine.tool_parsers.tagged_reader import TaggedReader

_LAYOUT = (
    *("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    *("<|close|>message<|sep|>", "<|close|>think<|sep|>"),
)
_INDEX = re.compile(r'\s*index="\d+"\s*')
_SEPARATOR = Tag("<|sep|>")
_JSON_TYPES = ("number", "integer", "boolean", "object", "array", "null")
_STRING = '" type="string"<|sep|>'


class ResponseChannel(TaggedReader):
    """Parses a response without calls: its text without the tags around it."""

    opening = Tag(*_LAYOUT)

    def _read_calls(self) -> Steps[bool]:
        yield from ()
        return True


class KimiK3ToolParser(InvokeToolParser):
    """Parses one response; the module's docstring defines a call."""

    tags = InvokeTags(
        sections=("<|open|>tools<|sep|>",),
        section_ends=("<|close|>tools<|sep|>",),
        invoke='<|open|>call tool="',
        invoke_end="<|close|>call<|sep|>",
        parameter='<|open|>argument key="',
        parameter_end="<|close|>argument<|sep|>",
        name_ends=(_STRING, *(f'" type="{name}"<|sep|>' for name in _JSON_TYPES), '"<|sep|>'),
        unique=True,
        mark="<|close|>",
        layout=_LAYOUT,
    )
    _attributes = ""
    """Attributes of a call's tag besides its function and its number."""

    def _read_invoked(self) -> Steps[str | None]:
        name = yield from self._read_function_name(Tag('"'))
        attributes = None if name is None else (yield from self._read_until(_SEPARATOR))
        if attributes is None:
            return None
        self._attributes = _INDEX.sub("", attributes)
        return name

    def _begin_function(self, name: str) -> None:
        super()._begin_function(name)
        self._arguments.said_instead = self._attributes

    def _is_json(self) -> bool:
        return any(self._unsettled.endswith(f'type="{each}"<|sep|>') for each in _JSON_TYPES)

    def _types(self, name: str) -> Types | None:
        """The possible types of a value: from its own tag if the schema allows both, else from the schema."""
        known = self._tools.types(self._function, name)
        if self._unsettled.endswith(_STRING):
            return STRING if not known or "string" in known else known
        if not self._is_json():
            return known
        return (known - STRING or STRING) if known else frozenset(_JSON_TYPES)

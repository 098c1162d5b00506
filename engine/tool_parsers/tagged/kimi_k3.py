"""Tool calls of Kimi K3: elements of tokens, ``<|open|>call tool="f" index="1"<|sep|>`` and so on.

A section ``tools`` holds them; each argument says its type. The answer before stands in a section
``response``, whose tags are no content.
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
    """A response that calls nothing: its text without the tags around it."""

    opening = Tag(*_LAYOUT)

    def _read_calls(self) -> Steps[bool]:
        yield from ()
        return True


class KimiK3ToolParser(InvokeToolParser):
    """Parses one response; see the module's text for what is a call."""

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
    """What the tag of a call says beside its function and its number."""

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
        """The possible types of a value: by its own word where the schema allows both, else by the
        schema."""
        known = self._tools.types(self._function, name)
        if self._unsettled.endswith(_STRING):
            return STRING if not known or "string" in known else known
        if not self._is_json():
            return known
        return (known - STRING or STRING) if known else frozenset(_JSON_TYPES)

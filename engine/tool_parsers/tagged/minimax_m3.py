"""Tool calls of MiniMax M3: elements named like the parameters, all tags behind a token of their own.

``<invoke name="f"><k>v</k><l><item>1</item></l></invoke>``: members of an object are elements inside
it, items of a list are called ``item``. What a text means is said by the tool's schema.
"""

from __future__ import annotations

import json
import re

from engine.tool_parsers.parameters import STRING, Types, ValueText
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged.invoke import InvokeTags, InvokeToolParser

NS = "]<]minimax[>["

_OPEN, _CLOSE = Tag(f"{NS}<"), Tag(f"{NS}</")
_NAME_END = Tag(">")
_ELEMENT = re.compile(r"[^<>\"\n\[\]]*+")
_ITEM = "item"
MAX_DEPTH = 32
"""Deeper elements are text."""


class MiniMaxM3ToolParser(InvokeToolParser):
    """Parses one response; see the module's text for what is a call."""

    tags = InvokeTags(
        sections=(f"{NS}<tool_call>",),
        section_ends=(f"{NS}</tool_call>",),
        invoke=f'{NS}<invoke name="',
        invoke_end=f"{NS}</invoke>",
        parameter=f"{NS}<",
        parameter_end=f"{NS}</",
        name_ends=(">",),
        unique=True,
    )

    def _read_parameter(self) -> Steps[bool]:
        yield from self._skip_space()
        if (yield from self._ends_here()):
            self._end_function()
            return False
        if (yield from self._accept(_CLOSE)):  # of an element that was not opened
            yield from self._read_word(_ELEMENT)
            yield from self._accept(_NAME_END)
            self._take()
            return True
        if not (yield from self._accept(_OPEN)):
            if (yield from self._is_body()):
                yield from self._pass_body()
                return not self.is_cut
            return (yield from self._skip_unexpected())
        name = yield from self._read_parameter_name(_NAME_END)
        if name is None:
            return (yield from self._skip_unexpected())
        self._take()
        self._give_arguments(self._arguments.key(name))
        return (yield from self._pass_element(name, (name,), 0))

    def _pass_element(self, name: str, path: tuple[str, ...], depth: int) -> Steps[bool]:
        """Pass on what an element holds, and move past its end; False if the response ends before."""
        child = yield from self._child()
        if child is not None and depth < MAX_DEPTH:
            return (yield from self._pass_children(name, path, depth, child))
        types = self._tools.types_at(self._function, path)
        value = ValueText(STRING if types is None and depth == 0 else types or frozenset())
        end = Tag(f"{NS}</{name}>", *self.tags.section_ends, self.tags.invoke_end, self.tags.invoke)
        found = yield from self._pass_until(end, lambda text: self._give_arguments(value.add(text)))
        if not found:
            self.is_cut = True
            return False
        if found != end.texts[0]:  # its own end is missing
            self._at -= len(found)
        self._take()
        self._give_arguments(
            _EMPTY.get(types or STRING, "") or value.end() if value.is_empty else value.end()
        )
        return True

    def _child(self) -> Steps[str | None]:
        """The name of the element that begins at this position, which is not consumed; None if text does."""
        length, name = self._length, None
        yield from self._skip_space()
        if not (yield from self._accept(_CLOSE)) and (yield from self._accept(_OPEN)):
            name = yield from self._read_word(_ELEMENT)
            name = name if name and (yield from self._accept(_NAME_END)) else None
        self._at = self._begin + length
        return name

    def _pass_children(self, name: str, path: tuple[str, ...], depth: int, first: str) -> Steps[bool]:
        """Pass on the elements inside one: items of a list, or members of an object."""
        is_list = first == _ITEM
        self._give_arguments("[" if is_list else "{")
        child: str | None = first
        while child is not None:
            yield from self._skip_space()
            yield from self._accept(Tag(f"{NS}<{child}>"))
            self._take()
            if not is_list:
                self._give_arguments(json.dumps(child, ensure_ascii=False) + ": ")
            if not (yield from self._pass_element(child, (*path, child), depth + 1)):
                return False
            child = yield from self._child()
            if child is not None:
                self._give_arguments(", ")
        yield from self._skip_space()
        yield from self._accept(Tag(f"{NS}</{name}>"))
        self._take()
        self._give_arguments("]" if is_list else "}")
        return True


_EMPTY: dict[Types, str] = {frozenset({"object"}): "{}", frozenset({"array"}): "[]"}
"""What an element without content is."""

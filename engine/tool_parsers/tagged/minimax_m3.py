"""Tool calls of MiniMax M3: elements named like the parameters, with a special token before every tag.

``<invoke name="f"><k>v</k><l><item>1</item></l></invoke>``: members of an object are elements inside it,
items of a list are named ``item``. The tool's schema determines the type of a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from engine.tool_parsers.parameters import STRING, Types, ValueText
from engine.tool_parsers.reader import Steps, Tag
from engine.tool_parsers.tagged.invoke import InvokeTags, InvokeToolParser

NS = "]<]minimax[>["

_OPEN = Tag(f"{NS}<")
_CLOSE = Tag(f"{NS}</")
_NAME_END = Tag(">")
_ELEMENT = re.compile(r"[^<>\"\n\[\]]*+")
_ITEM = "item"
_AROUND = ("invoke", "tool_call")
MAX_DEPTH = 32
"""Maximum depth; deeper elements are text."""


class MiniMaxM3ToolParser(InvokeToolParser):
    """Parses one response; the module's docstring defines a call."""

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
    _pieces: list[str] | None = None
    """Collects argument text while a part of the arguments is assembled."""

    def _read_parameter(self) -> Steps[bool]:
        yield from self._skip_space()
        if (yield from self._ends_here()):
            self._end_function()
            return False
        if (yield from self._accept(_CLOSE)):  # the end of an element that was not opened
            closed = yield from self._read_word(_ELEMENT)
            yield from self._accept(_NAME_END)
            if len(closed.split()) > 1:
                self._give_stray(closed)
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
        types = self._tools.types_at(self._function, (name,))
        if types and "array" in types:
            return (yield from self._pass_repeated(name))
        return (yield from self._pass_element(name, (name,), 0))

    def _pass_repeated(self, name: str) -> Steps[bool]:
        """Passes on a list that may be written as one element for each of its items."""
        values: list[str] = []
        again = True
        whole = True
        while again and whole:
            with self._collecting() as pieces:
                whole = yield from self._pass_element(name, (name,), 0)
            values.append("".join(pieces))
            length = self._length
            yield from self._skip_space()
            again = whole and bool((yield from self._accept(Tag(f"{NS}<{name}>"))))
            if again:
                self._take()
            else:
                self._at = self._begin + length
        self._give_arguments(_several(values))
        return whole

    @contextmanager
    def _collecting(self) -> Iterator[list[str]]:
        """Collects the arguments that are output within the block in a list."""
        outer = self._pieces
        pieces: list[str] = []
        self._pieces = pieces
        yield pieces
        self._pieces = outer

    def _give_arguments(self, text: str) -> None:
        if self._pieces is None:
            super()._give_arguments(text)
        else:
            self._pieces.append(text)

    def _pass_element(self, name: str, path: tuple[str, ...], depth: int) -> Steps[bool]:
        """Passes on the content of an element, and moves past its end; False if the response ends before."""
        child = yield from self._child()
        if child is not None and depth < MAX_DEPTH:
            return (yield from self._pass_children(name, path, depth, child))
        types = self._tools.types_at(self._function, path)
        value = ValueText(STRING if types is None and depth == 0 else types or frozenset())
        end = Tag(*_CLOSE.texts, self.tags.invoke)
        found = yield from self._pass_until(end, lambda text: self._give_arguments(value.add(text)))
        if not found:
            self.is_cut = True
            self._give_arguments(value.held)
            self._give_stray(self._arguments.said_instead)
            return False
        if found == self.tags.invoke:  # its own end is missing
            self._at -= len(found)
        else:
            yield from self._skip_end(name, path)
        self._take()
        self._give_arguments(
            _EMPTY.get(types or STRING, "") or value.end() if value.is_empty else value.end()
        )
        return True

    def _skip_end(self, name: str, path: tuple[str, ...]) -> Steps[None]:
        """Moves past a closing tag, whose start was read, if it belongs to this element, correctly spelled or
        not, and not to an element around it."""
        closed = yield from self._read_word(_ELEMENT)
        if not (yield from self._accept(_NAME_END)) or (closed != name and closed in (*path[:-1], *_AROUND)):
            self._at = self._begin
        elif len(closed.split()) > 1:
            self._give_stray(closed)

    def _child(self) -> Steps[str | None]:
        """The name of the element that begins at this position, which is not consumed; None if text begins
        here."""
        length = self._length
        name = None
        yield from self._skip_space()
        if not (yield from self._accept(_CLOSE)) and (yield from self._accept(_OPEN)):
            name = yield from self._read_word(_ELEMENT)
            name = name if name and (yield from self._accept(_NAME_END)) else None
        self._at = self._begin + length
        return name

    def _pass_children(self, name: str, path: tuple[str, ...], depth: int, first: str) -> Steps[bool]:
        """Passes on the elements inside another: items of a list, or members of an object, where several with
        one name form a list."""
        is_list = first == _ITEM
        values: dict[str, list[str]] = {}
        child: str | None = first
        whole = True
        while whole and child is not None:
            yield from self._skip_space()
            yield from self._accept(Tag(f"{NS}<{child}>"))
            self._take()
            with self._collecting() as pieces:
                whole = yield from self._pass_element(child, (*path, child), depth + 1)
            values.setdefault(child, []).append("".join(pieces))
            if is_list and child != _ITEM:
                self._give_stray(child)
            child = yield from self._child()
        if is_list:
            items = ", ".join(value for each in values.values() for value in each)
            self._give_arguments("[" + items + ("]" if whole else ""))
        else:
            members = (f"{json.dumps(key, ensure_ascii=False)}: {_several(values[key])}" for key in values)
            self._give_arguments("{" + ", ".join(members) + ("}" if whole else ""))
        if not whole:
            return False
        yield from self._skip_space()
        if (yield from self._accept(_CLOSE)):
            yield from self._skip_end(name, path)
        self._take()
        return True


def _several(values: list[str]) -> str:
    """The JSON of one value, or of a list if there are several."""
    return values[0] if len(values) == 1 else "[" + ", ".join(values) + "]"


_EMPTY: dict[Types, str] = {frozenset({"object"}): "{}", frozenset({"array"}): "[]"}
"""The values of an element without content."""

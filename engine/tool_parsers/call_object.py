"""Calls written as JSON, ``{"name": ..., "arguments": {...}}``, parsed as they arrive: most formats
have them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from engine.tokenization.unicode_text import is_unicode
from engine.tool_parsers.parameters import ToolSchemas
from engine.tool_parsers.reader import MAX_NAME_CHARS, ReplyReader, Steps, Tag

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_CALL_KEYS = ARGUMENT_KEYS | {"name", "id", "type"}
"""The only keys of a call without a tag around it: other objects are answers in JSON."""

_OBJECT = Tag("{")
_STRING = Tag('"')
_COLON = Tag(":")
_COMMA = Tag(",")
_OBJECT_END = Tag("}")
_LIST = Tag("[")
_LIST_END = Tag("]")
_BETWEEN_CALLS = Tag(",", ";")
FENCES = ("```json\n", "```\n", "```tool_call\n", "```python\n", "```tool_code\n")
FENCE = Tag(*FENCES)
"""The Markdown fence that some models put around calls, as if they were code."""

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]<]')
_SCALAR_END = re.compile(r"[,\]}\s<]")


@dataclass(slots=True)
class JsonScanner:
    """Finds where a JSON value ends in text that comes in pieces.

    A ``<`` outside strings cuts it off: a model that lost track continues with the format's next
    tag.
    """

    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    whole: bool = False
    """Whether the value has ended by itself."""

    def scan(self, text: str, start: int) -> int | None:
        """Index just after an object, a list or a string, or of what cuts it off; None if it goes on."""
        position = start
        if self.escaped and position < len(text):
            self.escaped = False
            position += 1
        while mark := (_IN_STRING if self.in_string else _OUTSIDE).search(text, position):
            position = mark.end()
            match mark.group():
                case "\\":
                    self.escaped = position == len(text)
                    position += 1
                case '"':
                    self.in_string = not self.in_string
                case "<":
                    return mark.start()
                case "{" | "[":
                    self.depth += 1
                case _:
                    self.depth -= 1
            if self.depth <= 0 and not self.in_string:
                self.whole = True
                return position
        return None


class CallObjectReader(ReplyReader):
    """A format whose calls carry their arguments as a JSON object, which is passed on as it is
    written."""

    raw_end: Tag | None = None
    """Ends text that is in the place of arguments and is not an object."""
    name_keys = frozenset({"name"})
    """Keys of the function's name."""
    _tools = ToolSchemas(())
    """The functions that a call without a tag may name."""

    def _pass_raw(self) -> Steps[None]:
        """Pass on text in the place of arguments as it is: the model wrote it, though it is not an
        object."""
        self._take()
        if self.raw_end is not None and (yield from self._pass_until(self.raw_end, self._give_arguments)):
            self._at = self._begin
            return
        self._give_arguments(self._text[self._at :])
        self._at = len(self._text)
        self._take()
        self.is_cut = True

    def _pass_object(self) -> Steps[bool]:
        """Pass on the JSON object at this position as arguments; False if it is cut off."""
        scanner = JsonScanner()
        while True:
            end = scanner.scan(self._text, self._at)
            start, self._at = self._at, len(self._text) if end is None else end
            self._give_arguments(self._text[start : self._at])
            self._take()
            if end is not None:
                return scanner.whole
            if not (yield from self._more()):
                self.is_cut = True
                return False

    def _read_value(self) -> Steps[str | None]:
        """The text of the JSON value at this position; None if it is cut off."""
        offset = self._length
        if (yield from self._peek()) in ("{", "[", '"'):
            scanner = JsonScanner()
            while (end := scanner.scan(self._text, self._at)) is None:
                self._at = len(self._text)
                if not (yield from self._more()):
                    return None
            self._at = end
            if not scanner.whole:
                return None
        else:
            while (found := _SCALAR_END.search(self._text, self._at)) is None:
                self._at = len(self._text)
                if not (yield from self._more()):
                    return None
            self._at = found.start()
        return self._text[self._begin + offset : self._at]

    def _read_string(self) -> Steps[str | None]:
        """The JSON string at this position; None if there is none, or one that cannot be a name."""
        if (yield from self._peek()) != '"':
            return None
        scanner, offset = JsonScanner(), self._length
        while (end := scanner.scan(self._text, self._at)) is None:
            self._at = len(self._text)
            if self._length - offset > MAX_NAME_CHARS or not (yield from self._more()):
                return None
        self._at = end
        text = self._text[self._begin + offset : self._at]
        value = _json_or_none(text) if len(text) <= MAX_NAME_CHARS else None
        return value if isinstance(value, str) and is_unicode(value) else None

    def _read_call_object(self, *, bare: bool = False) -> Steps[bool]:
        """Read the call at this position; False if there is none.

        It is certain once its name is known and its arguments begin. ``bare``: no tag announced it,
        so it must have arguments, and before them no other keys than calls have.
        """
        if not (yield from self._accept(_OBJECT)):
            return False
        call = _CallSoFar(bare)
        while (yield from self._read_member(call)):
            yield from self._skip_space()
            if (yield from self._accept(_OBJECT_END)):
                return call.begun or self._begin_whole(call)
            if not (yield from self._accept(_COMMA)):
                break
        return call.begun

    def _read_call_objects(self, *, bare: bool = False) -> Steps[bool]:
        """Read the calls at this position: a list of them, or one or more by themselves; maybe in a
        fence."""
        if (yield from self._accept(FENCE)):
            yield from self._skip_space()
        listed = yield from self._accept(_LIST)
        yield from self._skip_space()
        if not (yield from self._read_call_object(bare=bare)):
            return False
        more = True
        while more:
            more = yield from self._read_next_call_object(bare=bare)
        if listed:
            yield from self._skip_layout(_LIST_END)
        return True

    def _read_next_call_object(self, *, bare: bool) -> Steps[bool]:
        """After a call: read the separator and the next call; False if there is none."""
        self._take()
        yield from self._skip_space()
        yield from self._accept(_BETWEEN_CALLS)
        yield from self._skip_space()
        if self._at == len(self._text):  # the response has ended
            return False
        if (yield from self._read_call_object(bare=bare)):
            return True
        self._at = self._begin
        return False

    def _read_member(self, call: _CallSoFar) -> Steps[bool]:
        """Read one ``"key": value`` of a call; False if there is none, or one that a call cannot
        have."""
        yield from self._skip_space()
        key = yield from self._read_string()
        if key is None or (call.bare and not call.begun and key not in _CALL_KEYS):
            return False
        yield from self._skip_space()
        if not (yield from self._accept(_COLON)):
            return False
        yield from self._skip_space()
        if call.begun:
            return (yield from self._read_value()) is not None
        if key in self.name_keys:
            call.name = yield from self._read_string()
            return call.name is not None and (not call.bare or call.name in self._tools)
        if key in ARGUMENT_KEYS and call.name is not None:
            return (yield from self._read_arguments(call, call.name))
        value = yield from self._read_value()
        if key in ARGUMENT_KEYS and value is not None:
            call.arguments = _arguments_of(value)
            return call.arguments is not None
        return value is not None

    def _read_arguments(self, call: _CallSoFar, name: str) -> Steps[bool]:
        """Read the arguments of a call whose name is known; anything else is passed on if a tag
        announced the call."""
        if (yield from self._peek()) == "{":
            call.begun = True
            self._begin_call(name)
            return (yield from self._pass_object())
        offset = self._length
        value = yield from self._read_value()
        call.arguments = None if value is None else _arguments_of(value)
        if call.arguments is not None or call.bare:
            return call.arguments is not None
        call.begun = True
        self._at = self._begin + offset
        self._begin_call(name)
        yield from self._pass_raw()
        return False

    def _begin_whole(self, call: _CallSoFar) -> bool:
        """Begin a call whose arguments did not come last, or not as an object."""
        if call.name is None or (call.bare and call.arguments is None):
            return False
        self._begin_call(call.name, call.arguments or "{}")
        return True


@dataclass(slots=True)
class _CallSoFar:
    """What is known of a call while its object is read."""

    bare: bool
    name: str | None = None
    arguments: str | None = None
    begun: bool = False


def _arguments_of(value: str) -> str | None:
    """Arguments that were not passed on as they came: some models write the object into a string."""
    read = _json_or_none(value)
    if isinstance(read, str):
        return read if is_unicode(read) else None
    if value == "null":
        return "{}"
    return None if read is None else value


def _json_or_none(text: str) -> object | None:
    try:
        value: object = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value

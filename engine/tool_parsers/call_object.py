"""Parses calls written as JSON, ``{"name": ..., "arguments": {...}}``, as they arrive: most formats have
them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.tokenization.unicode_text import is_unicode
from engine.tool_parsers.reader import MAX_NAME_CHARS, ReplyReader, Steps, Tag

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
WRAPPER_KEYS = ARGUMENT_KEYS | {"args", "input", "kwargs", "params"}
"""Names of an object that holds all arguments, if the function has no parameter with that name."""
_FUNCTION = "function"
"""The key of an object with name and arguments, as in OpenAI's API."""
_OWN_KEYS = frozenset({"name", "id", "type", "tool_call_id", "call_id", "index"})
"""Keys with data about the call itself."""
_CALL_KEYS = ARGUMENT_KEYS | {"name", "id", "type", _FUNCTION}
"""The only keys of a call without a tag around it; other objects are answers in JSON."""

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

_OWN_VALUE = re.compile(r'"[\w.:-]*+"|\d++|null')
"""Matches an id, a type or a number."""
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]<]')
_SCALAR_END = re.compile(r"[,\]}\s<]")


@dataclass(slots=True)
class JsonScanner:
    """Finds the end of a JSON value in text that arrives in pieces.

    A ``<`` outside strings cuts the value off: it shows that the model continues with the format's next tag.
    """

    depth: int = 0
    in_string: bool = False
    escaped: bool = False
    whole: bool = False
    """Whether the value ended normally."""

    def scan(self, text: str, start: int) -> int | None:
        """Index just after an object, a list or a string, or at the text that cuts it off; None if it
        continues."""
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
    """Base of formats whose calls have their arguments as a JSON object, which is passed on as written."""

    raw_end: Tag | None = None
    """Ends text that replaces arguments and is not an object."""
    name_keys = frozenset({"name"})
    """Keys of the function's name."""

    def _pass_raw(self) -> Steps[None]:
        """Passes on text that replaces arguments unchanged: the model wrote it, although it is not an
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
        """Passes on the JSON object at this position as arguments; False if it is cut off."""
        scanner = JsonScanner()
        while True:
            end = scanner.scan(self._text, self._at)
            start = self._at
            self._at = len(self._text) if end is None else end
            self._give_arguments(self._text[start : self._at])
            self._take()
            if end is not None:
                return scanner.whole
            if not (yield from self._more()):
                self.is_cut = True
                return False

    def _read_value(self) -> Steps[str | None]:
        """Reads the JSON value at this position and returns its text; None if it is cut off."""
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
        """Reads the JSON string at this position; None if there is none, or one that cannot be a name."""
        if (yield from self._peek()) != '"':
            return None
        scanner = JsonScanner()
        offset = self._length
        while (end := scanner.scan(self._text, self._at)) is None:
            self._at = len(self._text)
            if self._length - offset > MAX_NAME_CHARS or not (yield from self._more()):
                return None
        self._at = end
        text = self._text[self._begin + offset : self._at]
        value = _json_or_none(text) if len(text) <= MAX_NAME_CHARS else None
        return value if isinstance(value, str) and is_unicode(value) else None

    def _read_call_object(self, *, bare: bool = False) -> Steps[bool]:
        """Reads the call at this position; False if there is none.

        A call is certain once its name is known and its arguments begin. ``bare``: no tag announced it, so it
        must have arguments, and before them only keys that calls have.
        """
        call = _CallSoFar(bare)
        if not (yield from self._read_members(call)):
            return call.begun
        return call.begun or self._begin_whole(call)

    def _read_members(self, call: _CallSoFar) -> Steps[bool]:
        """Reads the object at this position as a call; False if the object does not end properly."""
        if not (yield from self._accept(_OBJECT)):
            return False
        while (yield from self._read_member(call)):
            yield from self._skip_space()
            if (yield from self._accept(_OBJECT_END)):
                return True
            if not (yield from self._accept(_COMMA)):
                break
        if call.begun:
            yield from self._skip_broken_members()
        return False

    def _skip_broken_members(self) -> Steps[None]:
        """Handles text in the object after the arguments that is not a member."""
        self._at = self._begin
        yield from self._skip_space()
        yield from self._accept(_COMMA)
        yield from self._skip_space()
        if (yield from self._peek()) in ("", *"{[]<`"):  # the object's end is missing
            return
        self._take()
        end = Tag("}", *(() if self.raw_end is None else self.raw_end.texts))
        found = yield from self._pass_until(end, self._give_stray)
        self._at -= 0 if found == "}" else len(found)
        self._take()

    def _read_call_objects(self, *, bare: bool = False) -> Steps[bool]:
        """Reads the calls at this position: a list of them, or one or more without a list; possibly in a
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
        """Reads the separator and the next call after a call; False if there is none."""
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
        """Reads one ``"key": value`` of a call; False if there is none, or one that a call cannot have."""
        yield from self._skip_space()
        offset = self._length
        key = yield from self._read_string()
        if key is None or (call.bare and not call.begun and key not in _CALL_KEYS):
            return False
        yield from self._skip_space()
        if not (yield from self._accept(_COLON)):
            return False
        yield from self._skip_space()
        if call.begun:
            return (yield from self._skip_member(key, offset))
        if key in self.name_keys and call.name is None:
            call.name = yield from self._read_string()
            return call.name is not None and (not call.bare or call.name in self._tools)
        if key == _FUNCTION and call.name is None:
            return (yield from self._read_function(call))
        if self._holds_all(key, call) and call.name is not None:
            return (yield from self._read_arguments(call, key, call.name))
        value = yield from self._read_value()
        if value is not None:
            call.add(key, value)
        return value is not None

    def _skip_member(self, key: str, offset: int) -> Steps[bool]:
        """Reads the value of a member after the arguments; passes it on as stray text if it is not about the
        call."""
        value = yield from self._read_value()
        if value is None:
            return False
        is_own = key in _OWN_KEYS and _OWN_VALUE.fullmatch(value) is not None
        if not is_own and value not in ("{}", "null"):
            self._give_stray(self._text[self._begin + offset : self._at])
            self._take()
        return True

    def _read_function(self, call: _CallSoFar) -> Steps[bool]:
        """Reads the value of ``"function"``: the name, or an object with name and arguments."""
        if (yield from self._peek()) != "{":
            call.name = yield from self._read_string()
            return call.name is not None and (not call.bare or call.name in self._tools)
        return (yield from self._read_members(call))

    def _holds_all(self, key: str, call: _CallSoFar) -> bool:
        """Whether a member with this name holds all arguments."""
        if key in ARGUMENT_KEYS:
            return True
        return key in WRAPPER_KEYS and (call.name is None or self._tools.types(call.name, key) is None)

    def _read_arguments(self, call: _CallSoFar, key: str, name: str) -> Steps[bool]:
        """Reads the arguments of a call whose name is known; any other text is passed on if a tag announced
        the call."""
        if (yield from self._peek()) == "{" and not (call.is_flat and key not in ARGUMENT_KEYS):
            call.begun = True
            self._begin_call(name)
            self._give_stray(call.other_members())
            return (yield from self._pass_object())
        offset = self._length
        value = yield from self._read_value()
        if value is not None and (key not in ARGUMENT_KEYS or _arguments_of(value) is not None):
            call.add(key, value)
            return True
        if call.bare:
            return False
        call.begun = True
        self._at = self._begin + offset
        self._begin_call(name)
        self._give_stray(call.other_members())
        yield from self._pass_raw()
        return False

    def _begin_whole(self, call: _CallSoFar) -> bool:
        """Begins a call whose arguments did not come last, or are not an object, or are next to its name."""
        if call.name is None or (call.bare and not ARGUMENT_KEYS & call.members.keys()):
            return False
        arguments, stray = self._members_as_arguments(call, call.name)
        self._begin_call(call.name, arguments)
        self._give_stray(stray)
        return True

    def _members_as_arguments(self, call: _CallSoFar, name: str) -> tuple[str, str]:
        """Returns the arguments among the members that were read, and the text of the other members."""
        for key in ("arguments", "parameters", *sorted(WRAPPER_KEYS - ARGUMENT_KEYS)):
            value = call.members.get(key)
            said = None if value is None else _arguments_of(value)
            is_object = said is not None and said.lstrip().startswith("{")
            if said is None or not (key in ARGUMENT_KEYS or (is_object and self._holds_all(key, call))):
                continue
            if said.strip() in ("", "{}") and call.is_flat:
                continue
            del call.members[key]
            return said, call.other_members()
        declared = {key for key in call.members if self._tools.types(name, key) is not None}
        flat = {
            key: value
            for key, value in call.members.items()
            if key in declared or key not in _OWN_KEYS | ARGUMENT_KEYS
        }
        return "{" + _members_text(flat) + "}", ", ".join(call.again)


@dataclass(slots=True)
class _CallSoFar:
    """The data of a call while its object is read."""

    bare: bool
    name: str | None = None
    members: dict[str, str] = field(default_factory=dict)
    """The other members, as written."""
    again: list[str] = field(default_factory=list)
    """The text of members with a repeated name."""
    begun: bool = False

    def add(self, key: str, value: str) -> None:
        if key in self.members:
            self.again.append(_members_text({key: value}))
        else:
            self.members[key] = value

    @property
    def is_flat(self) -> bool:
        """Whether there are members besides the name that may be arguments."""
        return not self.members.keys() <= _OWN_KEYS | WRAPPER_KEYS

    def other_members(self) -> str:
        """The text of the members without data about the call itself."""
        others = {
            key: value
            for key, value in self.members.items()
            if not (key in _OWN_KEYS and _OWN_VALUE.fullmatch(value)) and value not in ("{}", "null")
        }
        return ", ".join(filter(None, [_members_text(others), *self.again]))


def _members_text(members: Mapping[str, str]) -> str:
    return ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in members.items())


def _arguments_of(value: str) -> str | None:
    """Returns arguments that were not passed on as they arrived: some models write the object into a
    string."""
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

"""Converts a tool call's arguments, as the model writes them, to a JSON object that every client can parse.

Text is passed on as soon as it is valid: up to a finished value, and the inside of a string while it grows.
So the text that has been passed on can always be completed:

* A wrong escape or a raw control character inside a string is escaped, and keeps its apparent meaning. A
  comma before a closing bracket is omitted, Python's ``True`` and ``None`` are spelled as in JSON, a fence
  around the object is removed, and an object in a string becomes that object.
* If the text stops being a JSON object, or ends too early between two values, the object is closed there and
  gets a last member ``INVALID_JSON`` with everything that the model wrote. When a client sends it back, the
  member is removed again.
* If the reply ends inside a string, the string stays open, so that no client takes half a value for the
  whole.
* A name that an object has twice, and text of the call that is not an argument, end the object in the same
  way: nothing that the model wrote is lost. So the object's last bracket is written at the end of the call.

Every decision depends on the text read so far and never on how it was split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from engine.tokenization.tool_arguments import INVALID_JSON, MAX_DEPTH

MAX_KEY_CHARS = 1000
MAX_SCALAR_CHARS = 400

_CHUNK_CHARS = 4096

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = "[0-9a-fA-F]"
_HIGH = f"u[dD][89abAB]{_HEX}{{2}}"
_ESCAPE = re.compile(rf'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|{_HIGH}\\u[dD][c-fC-F]{_HEX}{{2}})')
_ESCAPE_BEGUN = re.compile(rf"\\(?:u{_HEX}{{0,3}}|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?)?")
_MAX_ESCAPE_CHARS = 12
_KEY = re.compile(rf'[ \t\r\n]*"(?:[^"\\\x00-\x1f]|{_ESCAPE.pattern})*"[ \t\r\n]*:')
_SCALAR_CHARS = re.compile(r"[-+.0-9a-zA-Z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_FENCE = re.compile(r"```\w*(?=[\s{])")
_NO_STRAY = re.compile(r"[}\])`\s]*+")
"""Matches text that may follow an object: superfluous brackets, the end of a fence."""
_FENCE_BEGUN = re.compile(r"`{1,3}|```\w{1,20}")


class CallArguments:
    """Takes the arguments' text in pieces of any size; ``feed`` and ``finish`` return the text to pass on."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._text = ""
        """Text that has been read but not decided on yet."""
        self._held = ""
        """Spaces, separators and a key, which are passed on with the value that follows them."""
        self._given: list[str] = []
        self._new: list[str] = []
        self._open: list[str] = []
        """The closing brackets of the open objects and lists, outermost first."""
        self._names: list[set[str]] = []
        """For each of them, the names of its members so far."""
        self._stray: list[str] = []
        """Text of the call that is not an argument."""
        self._behind: list[str] = []
        """Text after the object."""
        self._is_broken = False
        """Whether the call ended inside a string."""
        self._before_string: int | None = None
        """Number of pieces passed on when the open string value began."""
        self._step: Callable[[], bool] | None = self._read_value
        """Reads from ``_text``; returns False when it needs more text. None if nothing more is read."""
        self._ended = False
        self._is_whole = False

    def feed(self, text: str) -> str:
        self._raw.append(text)
        given = []
        for start in range(0, len(text), _CHUNK_CHARS):  # steps slice off what they read: a short text
            self._text += text[start : start + _CHUNK_CHARS]
            given.append(self._run())
        return "".join(given)

    def add_stray(self, text: str) -> None:
        """Adds text of the call that is not an argument: ``INVALID_JSON`` includes it."""
        self._stray.append(text)

    @property
    def _has_stray(self) -> bool:
        return self._is_broken or _NO_STRAY.fullmatch("".join([*self._stray, *self._behind])) is None

    def leave(self) -> str:
        """Handles that the reply has ended inside the call: returns the text not yet passed on, unchanged, so
        that the arguments are not valid JSON."""
        rest = "".join([self._held, self._text, *self._stray])
        is_object = self._before_string is None and _is_json("".join([*self._given, rest]))
        return "" if is_object else rest

    @property
    def is_closed(self) -> bool:
        """Whether the object has its last bracket."""
        return self._step == self._read_rest

    def finish(self, *, is_whole: bool = False) -> str:
        """Handles the end of the call: returns the text that completes the object, if that is possible.

        ``is_whole``: the call's end was seen. Then missing arguments are an empty object, and brackets
        missing after a value are closed. Otherwise the call was cut off, which ``INVALID_JSON`` reports.
        """
        self._ended = True
        self._is_whole = is_whole
        given = self._run()
        if is_whole and self._before_string is not None:
            self._give('"')
            self._before_string = None
            self._is_broken = True
        if self._before_string is None:
            self._give(self._completion(self._given, self._open))
        return given + self._take()

    @property
    def has_begun(self) -> bool:
        """Whether there was any argument text."""
        return any(piece.strip() for piece in self._raw)

    @property
    def text(self) -> str:
        """The finished arguments: always a JSON object. If a string was never closed, only ``INVALID_JSON``
        contains it."""
        if self._before_string is None:
            return "".join(self._given)
        given = self._given[: self._before_string]
        return "".join(given) + self._completion(given, self._open)

    def _completion(self, given: list[str], is_open: list[str]) -> str:
        raw = "".join([*self._raw, *self._stray])
        if self.is_closed and not self._has_stray:
            return "".join(is_open)
        if self._is_whole and not self._has_stray:
            if not raw.strip():
                return "{}"
            if self._step == self._read_next and is_open:
                return "".join(reversed(is_open))
            if (said := self._object_in_a_string(raw)) is not None:
                return said
        member = f"{json.dumps(INVALID_JSON)}: {json.dumps(raw, ensure_ascii=False)}"
        if not is_open:
            return "{" + member + "}"
        inner = "".join(reversed(is_open[1:]))
        is_empty = not inner and "".join(given).rstrip().endswith("{")
        return f"{inner}{'' if is_empty else ', '}{member}}}"

    def _object_in_a_string(self, raw: str) -> str | None:
        """The object that some models write into a string; None if the text is not such a string."""
        if self._given or not raw.lstrip().startswith('"'):
            return None
        try:
            said = json.loads(raw, strict=False)
        except (ValueError, RecursionError):
            return None
        if not said.lstrip().startswith("{"):
            return "{}" if not said.strip() else None
        inner = CallArguments()
        return inner.feed(said) + inner.finish(is_whole=True)

    def _run(self) -> str:
        while self._step is not None and self._step():
            pass
        return self._take()

    def _take(self) -> str:
        given = "".join(self._new)
        self._new.clear()
        return given

    def _give(self, text: str) -> None:
        self._given.append(text)
        self._new.append(text)

    def _break(self) -> bool:
        self._step = None
        return False

    def _next_char(self) -> str | None:
        """The first character that is not a space; None if it has not arrived."""
        space = _SPACE.match(self._text)
        assert space is not None
        self._held += space.group()
        self._text = self._text[space.end() :]
        return self._text[0] if self._text else None

    def _give_held(self, length: int) -> None:
        self._give(self._held + self._text[:length])
        self._held = ""
        self._text = self._text[length:]

    def _read_value(self) -> bool:
        char = self._next_char()
        if char is None:
            return False
        if char == "{" or (char == "[" and self._open):
            return self._open_container(char)
        if not self._open:
            return self._skip_fence() if char == "`" else self._break()
        if char == self._open[-1] == "]" and "," in self._held:
            return self._close_container()
        if char == '"':
            self._before_string = len(self._given)
            self._give_held(1)
            self._step = self._read_string
            return True
        return self._read_scalar()

    def _skip_fence(self) -> bool:
        """Skips a Markdown fence around the object, as around code."""
        fence = _FENCE.match(self._text)
        if fence is not None:
            self._text = self._text[fence.end() :]
            return True
        if _FENCE_BEGUN.fullmatch(self._text) and not self._ended:
            return False
        return self._break()

    def _open_container(self, char: str) -> bool:
        if len(self._open) == MAX_DEPTH:
            return self._break()
        self._give_held(1)
        self._open.append("}" if char == "{" else "]")
        self._names.append(set())
        self._step = self._read_first
        return True

    def _read_first(self) -> bool:
        """Reads just inside an object or a list, which may be empty."""
        char = self._next_char()
        if char is None:
            return False
        if char == self._open[-1]:
            return self._close_container()
        self._step = self._read_key if self._open[-1] == "}" else self._read_value
        return True

    def _close_container(self) -> bool:
        self._held = self._held.replace(",", "")  # a trailing comma
        if len(self._open) == 1:  # written when the call ends, unless text follows that is not an argument
            self._give(self._held)
            self._held = ""
            self._text = self._text[1:]
            self._step = self._read_rest
            return True
        self._give_held(1)
        self._open.pop()
        self._names.pop()
        self._step = self._read_next
        return True

    def _read_rest(self) -> bool:
        """Reads text after the object."""
        self._behind.append(self._text)
        self._text = ""
        return False

    def _read_key(self) -> bool:
        if self._next_char() == "}" and "," in self._held:
            return self._close_container()
        key = _KEY.match(self._text[:MAX_KEY_CHARS])
        if key is None:
            return self._break() if self._ended or len(self._text) >= MAX_KEY_CHARS else False
        name: str = json.loads(key.group().rstrip()[:-1])
        if name in self._names[-1]:  # a parser of the object would keep only one of the two values
            return self._break()
        self._names[-1].add(name)
        self._held += key.group()
        self._text = self._text[key.end() :]
        self._step = self._read_value
        return True

    def _read_scalar(self) -> bool:
        found = _SCALAR_CHARS.match(self._text[:MAX_SCALAR_CHARS])
        assert found is not None
        if found.end() == len(self._text) and not self._ended:
            return False  # a number may continue
        word = _PYTHON_WORDS.get(found.group(), found.group())
        is_cut = found.end() == len(self._text) and not self._is_whole
        if is_cut or found.end() == MAX_SCALAR_CHARS or not _SCALAR.fullmatch(word):
            return self._break()
        self._text = word + self._text[found.end() :]
        self._give_held(len(word))
        self._step = self._read_next
        return True

    def _read_next(self) -> bool:
        """Reads after a value: a comma, or the end of the enclosing object or list."""
        char = self._next_char()
        if char is None:
            return False
        if char == self._open[-1]:
            return self._close_container()
        if char != ",":
            return self._break()
        self._held += char
        self._text = self._text[1:]
        self._step = self._read_key if self._open[-1] == "}" else self._read_value
        return True

    def _read_string(self) -> bool:
        """Reads inside a string value. Any text can be made part of a string, so only its end matters."""
        if not self._text:
            return False
        plain = _PLAIN.match(self._text)
        if plain is not None:
            self._give_held(plain.end())
        elif self._text[0] == '"':
            self._give_held(1)
            self._before_string = None
            self._step = self._read_next
        elif self._text[0] == "\\":
            return self._read_escape()
        else:
            self._give(json.dumps(self._text[0])[1:-1])
            self._text = self._text[1:]
        return True

    def _read_escape(self) -> bool:
        head = self._text[:_MAX_ESCAPE_CHARS]
        escape = _ESCAPE.match(head)
        if escape is not None:
            self._give_held(escape.end())
            return True
        if _ESCAPE_BEGUN.fullmatch(head) and not self._ended:
            return False
        self._give("\\\\")
        self._text = self._text[1:]
        return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True

"""Reads the free text of a custom tool from the JSON arguments that the model writes.

The model is shown a custom tool as a function with one string parameter ``input``. Its arguments arrive in
arbitrary pieces; text is returned as soon as it is certain.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from engine.tokenization.unicode_text import is_unicode

PARAMETER = "input"

_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_PLAIN = re.compile(r'[^"\\]+')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")
_UNREADABLE = "\ufffd"


def as_arguments(text: str) -> str:
    """The JSON arguments of a call with this input."""
    return json.dumps({PARAMETER: text}, ensure_ascii=False)


class CustomInputReader:
    """Reads the arguments of one call. The result does not depend on how they were split."""

    def __init__(self) -> None:
        self._text = ""
        """Text that has been read but not yet returned."""
        self._step: Callable[[list[str]], bool] = self._read_head
        self._high_surrogate: int | None = None

    def feed(self, arguments: str) -> str:
        """Takes the next piece; returns the text that has become certain."""
        self._text += arguments
        pieces: list[str] = []
        while self._step(pieces):
            pass
        return "".join(pieces)

    def finish(self) -> str:
        """Ends the arguments; returns the text held back."""
        if self._step == self._read_head:
            return _text_of(self._text)
        return _UNREADABLE if self._step == self._read_string and self._high_surrogate is not None else ""

    def _read_head(self, pieces: list[str]) -> bool:
        head = _HEAD.match(self._text)
        if head is None:
            return False
        self._text = self._text[head.end() :]
        self._step = self._read_string
        return True

    def _read_string(self, pieces: list[str]) -> bool:
        """Reads a run of plain characters, one escape, or the end of the string."""
        if not self._text:
            return False
        if plain := _PLAIN.match(self._text):
            self._give(pieces, plain.group())
            self._text = self._text[plain.end() :]
            return True
        if self._text[0] == '"':
            self._give(pieces, "")
            self._text = ""
            self._step = self._ignore
            return False
        return self._read_escape(pieces)

    def _read_escape(self, pieces: list[str]) -> bool:
        if len(self._text) < 2:
            return False
        kind = self._text[1]
        if kind != "u":
            self._give(pieces, _ESCAPES.get(kind, "\\" + kind))
            self._text = self._text[2:]
            return True
        if len(self._text) < 6 and set(self._text[2:]) <= _HEX_DIGITS:
            return False
        digits = _HEX.match(self._text, 2)
        if digits is None:
            self._give(pieces, "\\u")
            self._text = self._text[2:]
            return True
        self._give_unit(pieces, int(digits.group(), 16))
        self._text = self._text[6:]
        return True

    def _give(self, pieces: list[str], text: str) -> None:
        """Adds text to ``pieces``; a lone surrogate before it becomes U+FFFD."""
        if self._high_surrogate is not None:
            pieces.append(_UNREADABLE)
            self._high_surrogate = None
        pieces.append(text)

    def _give_unit(self, pieces: list[str], unit: int) -> None:
        """Adds one UTF-16 unit of an escape."""
        high = self._high_surrogate
        if 0xDC00 <= unit < 0xE000:
            self._high_surrogate = None
            pieces.append(_UNREADABLE if high is None else _joined(high, unit))
        elif 0xD800 <= unit < 0xDC00:
            self._give(pieces, "")
            self._high_surrogate = unit
        else:
            self._give(pieces, chr(unit))

    def _ignore(self, pieces: list[str]) -> bool:
        """Skips what follows the text."""
        self._text = ""
        return False


def _joined(high: int, low: int) -> str:
    """The character of a surrogate pair."""
    return chr(0x10000 + ((high - 0xD800) << 10) + low - 0xDC00)


def _text_of(arguments: str) -> str:
    """The text of arguments in another format: their ``input`` if there is one, else all of them."""
    try:
        value = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    if isinstance(value, dict):
        value = value.get(PARAMETER)
    return value if isinstance(value, str) and is_unicode(value) else arguments

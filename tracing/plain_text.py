"""Makes text from strangers safe for a terminal, a log or a table: names of jobs and tools come from
requests, and may contain what a terminal or a spreadsheet takes for a command."""

from __future__ import annotations

import re
from typing import BinaryIO, TextIO

_COMMANDS = (
    "\x00-\x09\x0b-\x1f\x7f-\x9f"  # control characters, also the 8-bit ones, except line ends
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"  # change direction or end lines
    "\ud800-\udfff"  # surrogates, which cannot be encoded
)
_IN_TEXT = re.compile(f"[{_COMMANDS}]")
_IN_NAME = re.compile(f"[\n{_COMMANDS}]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
FORMULA = "^[=+\\-@\t\r\n]"
"""Matches the first character of a cell that a spreadsheet takes for a formula."""


def plain_name(name: str) -> str:
    """The name in one line, with control characters as JSON writes them."""
    return _IN_NAME.sub(_escape, name)


def plain_text(text: str) -> str:
    """Like ``plain_name``, but keeps line ends."""
    return _IN_TEXT.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return _SHORT.get(found[0]) or f"\\u{ord(found[0]):04x}"


class PlainStream:
    """A stream that escapes control characters in all text; JSON stays JSON."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(plain_text(text))

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def buffer(self) -> BinaryIO:
        """The binary stream under the text, for binary output."""
        return self._stream.buffer

    @property
    def encoding(self) -> str:
        return self._stream.encoding

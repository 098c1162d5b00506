"""Text from strangers, as it may stand in a terminal, a log or a table: names of jobs and tools come from
requests, and may contain what a terminal or a spreadsheet takes for a command."""

from __future__ import annotations

import re
from typing import BinaryIO, TextIO

_COMMANDS = (
    "\x00-\x09\x0b-\x1f\x7f-\x9f"  # control characters, the 8-bit ones too, but for the end of a line
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"  # what turns or parts lines
    "\ud800-\udfff"  # halves of characters, which cannot be written at all
)
_IN_TEXT = re.compile(f"[{_COMMANDS}]")
_IN_NAME = re.compile(f"[\n{_COMMANDS}]")
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
FORMULA = "^[=+\\-@\t\r\n]"
"""First characters of a cell that a spreadsheet takes for a formula."""


def plain_name(name: str) -> str:
    """In one line, its control characters as JSON writes them."""
    return _IN_NAME.sub(_escape, name)


def plain_text(text: str) -> str:
    """The same, but lines stay lines."""
    return _IN_TEXT.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    return _SHORT.get(found[0]) or f"\\u{ord(found[0]):04x}"


class PlainStream:
    """A stream that no name can command; what is written in JSON stays JSON."""

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
        """Below the text: for what is not."""
        return self._stream.buffer

    @property
    def encoding(self) -> str:
        return self._stream.encoding

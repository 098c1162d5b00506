"""Shows a chat: the model's text on one stream, notes on another. Knows no agent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import Enum
from typing import TextIO

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class Style(Enum):
    """SGR codes: the eight colors that every terminal has."""

    PLAIN = ""
    DIM = "2"
    CALL = "36"
    ERROR = "31"


class Screen:
    """Writes pieces as they arrive; a note always starts a new line."""

    def __init__(self, out: TextIO, notes: TextIO, environment: Mapping[str, str] = os.environ) -> None:
        self._out = out
        self._notes = notes
        self._in_line = False
        self._colored = (
            notes.isatty() and not environment.get("NO_COLOR") and environment.get("TERM", "") != "dumb"
        )

    def say(self, piece: str) -> None:
        """Writes a piece of the model's text."""
        if piece:
            self._out.write(harmless(piece))
            self._out.flush()
            self._in_line = not piece.endswith("\n")

    def end_line(self) -> None:
        if self._in_line:
            self.say("\n")

    def note(self, text: str, style: Style = Style.DIM) -> None:
        """Writes a note on a separate line."""
        self.end_line()
        text = harmless(text)
        if self._colored and style.value:
            text = f"\x1b[{style.value}m{text}\x1b[0m"
        self._notes.write(f"{text}\n")
        self._notes.flush()


def harmless(text: str) -> str:
    """Returns the text without control characters, which could control the terminal."""
    return text.translate(_CONTROLS)

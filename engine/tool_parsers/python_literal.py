"""Values as Python writes them, turned into JSON; nothing is evaluated."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""\s*+(?:
        (?P<string> '{3}(?:[^'\\]++|\\.|'(?!''))*+'{3} | "{3}(?:[^"\\]++|\\.|"(?!""))*+"{3}
                  | '(?:[^'\\]++|\\.)*+'               | "(?:[^"\\]++|\\.)*+" )
      | (?P<number> -?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?(?![\w.]) )
      | (?P<word> [A-Za-z]++ )
      | (?P<mark> [\[\](){},:] )
    )\s*+""",
    re.DOTALL | re.VERBOSE,
)
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_MARKS = {"(": "[", ")": "]"}

_ESCAPE = re.compile(
    r"\\([0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|U0010[0-9a-fA-F]{4}|.)",
    re.DOTALL,
)
_ESCAPES = dict(zip("ntrabfv\\'\"", "\n\t\r\a\b\f\v\\'\"", strict=True)) | {"\n": ""}

_OUTSIDE = re.compile(r"""["'\[\](){},]""")
_IN_STRING = re.compile(r"""["'\\]""")


def literal_json(text: str) -> str | None:
    """The JSON text of a Python literal; None if it is no literal that JSON can express."""
    pieces: list[str] = []
    position = 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or (piece := _json_piece(token)) is None:
            return None
        if piece in "]}" and pieces and pieces[-1] == ",":
            pieces.pop()
        pieces.append(piece)
        position = token.end()
    joined = "".join(piece + " " if piece in ",:" else piece for piece in pieces)
    try:
        json.loads(joined)
    except (ValueError, RecursionError):
        return None
    return joined


def _json_piece(token: re.Match[str]) -> str | None:
    kind, text = token.lastgroup, token.group(token.lastgroup or 0)
    if kind == "string":
        quotes = 3 if text[:3] in ("'''", '"""') and len(text) >= 6 else 1
        return _json_string(_ESCAPE.sub(_unescaped, text[quotes:-quotes]))
    if kind == "word":
        return _WORDS.get(text)
    return _MARKS.get(text, text)


def _json_string(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # halves of surrogate pairs stay escapes
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)


def _unescaped(escape: re.Match[str]) -> str:
    said = escape.group(1)
    if said in _ESCAPES:
        return _ESCAPES[said]
    if said[0] in "01234567":
        return chr(int(said, 8))
    if said[0] in "xuU" and len(said) > 1:
        return chr(int(said[1:], 16))
    return escape.group()


@dataclass(slots=True)
class LiteralScanner:
    """Finds where an argument ends in text that comes in pieces: before a ``,`` or the closing
    bracket."""

    depth: int = 0
    quote: str = ""
    """The quote that closes the open string."""
    ended: bool = False

    def scan(self, text: str, position: int) -> int:
        """Index of the argument's end if ``ended`` is set, else of where to continue when there is
        more text."""
        while mark := (_IN_STRING if self.quote else _OUTSIDE).search(text, position):
            begin = mark.start()
            reached = self._in_string(text, begin) if self.quote else self._outside(text, begin)
            if reached is None or self.ended:
                return begin
            position = reached
        return len(text)

    def _in_string(self, text: str, position: int) -> int | None:
        if text[position] == "\\":
            return position + 2 if position + 1 < len(text) else None
        if text.startswith(self.quote, position):
            position += len(self.quote)
            self.quote = ""
            return position
        return None if self.quote.startswith(text[position:]) else position + 1

    def _outside(self, text: str, position: int) -> int | None:
        char = text[position]
        if char in "'\"":
            row = text[position : position + 3]
            if len(row) < 3 and row == len(row) * char:
                return None
            self.quote = row if row == 3 * char else char
            return position + len(self.quote)
        if char in "([{":
            self.depth += 1
        elif self.depth == 0:
            self.ended = True
        elif char in ")]}":
            self.depth -= 1
        return position + 1

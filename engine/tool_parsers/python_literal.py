"""Converts values written in Python to JSON; nothing is evaluated."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""\s*+(?:
        (?P<string> (?:[rR][bBfF]?|[bBfF][rR]?|[uU])?
        (?: '{3}(?:[^'\\]++|\\.|'(?!''))*+'{3} | "{3}(?:[^"\\]++|\\.|"(?!""))*+"{3}
          | '(?:[^'\\]++|\\.)*+'               | "(?:[^"\\]++|\\.)*+" ))
      | (?P<number> [+-]?\s*+(?: 0[xX][0-9a-fA-F_]++ | 0[oO][0-7_]++ | 0[bB][01_]++
                  | (?:[0-9][0-9_]*+(?:\.[0-9_]*+)?|\.[0-9][0-9_]*+)(?:[eE][+-]?[0-9]++)?)(?![\w.]) )
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
_PREFIX = re.compile(r"[rRbBuUfF]*+")
_ESCAPES = dict(zip("ntrabfv\\'\"", "\n\t\r\a\b\f\v\\'\"", strict=True)) | {"\n": ""}

_MAX_LOOK = 300
_BEHIND_NESTED = re.compile(r"""\s*+(?:[,\])}:]|(?:[rRbBuUfF]{0,2}+)["'])""")
"""Matches the text that may follow a string in a list or an object."""
_BEHIND_STRING = re.compile(
    r"""\s*+(?: , \s*+ (?: \w++ \s*+ = | \) )
           | \) (?: [\s)]*+ (?: [,\]<;`] | [\w.-]++\( ) | [ \t]*+ \n )
           | [rRbBuUfF]{0,2}+["'] )""",
    re.VERBOSE,
)
"""Matches the text after a string that is an argument: the next one's name, the call's end, another
string."""
_MAY_FOLLOW = re.compile(r"\s*+(?:,\s*+\w*+\s*+|\)[\s)]*+[\w.-]*+|[rRbBuUfF]{0,2}+)?")
"""Matches text that may still become such a text."""
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
        if piece.startswith('"') and pieces and pieces[-1].startswith('"'):  # adjacent strings are one string
            piece = pieces.pop()[:-1] + piece[1:]
        pieces.append(piece)
        position = token.end()
    joined = "".join(piece + " " if piece in ",:" else piece for piece in pieces)
    try:
        json.loads(joined, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return joined


def _finite(text: str) -> float:
    """Parses a number. JSON has no infinity, so a number that is too large is an error."""
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(text)
    return value


def _json_piece(token: re.Match[str]) -> str | None:
    kind = token.lastgroup
    text = token.group(token.lastgroup or 0)
    if kind == "string":
        return _string_piece(text)
    if kind == "number":
        return _number_piece(text)
    if kind == "word":
        return _WORDS.get(text)
    return _MARKS.get(text, text)


def _string_piece(text: str) -> str | None:
    prefix = _PREFIX.match(text)
    assert prefix is not None
    letters = prefix.group().lower()
    text = text[prefix.end() :]
    quotes = 3 if text[:3] in ("'''", '"""') and len(text) >= 6 else 1
    inner = text[quotes:-quotes]
    if "f" in letters and "{" in inner:  # a format string's value is not in the text
        return None
    return _json_string(inner if "r" in letters else _ESCAPE.sub(_unescaped, inner))


def _number_piece(text: str) -> str | None:
    """A number as JSON writes it: without ``+``, ``_``, a base, or a point at its start or end."""
    sign = "-" if text[0] == "-" else ""
    digits = text.lstrip("+- ").replace("_", "").lower()
    if digits[:2] in ("0x", "0o", "0b"):
        return sign + str(int(digits, 0)) if len(digits) > 2 else None
    mantissa, mark, exponent = digits.partition("e")
    whole, point, fraction = mantissa.partition(".")
    fraction = f".{fraction or 0}" if point else ""
    return f"{sign}{whole.lstrip('0') or 0}{fraction}{mark}{exponent}"


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
    """Finds the end of an argument in text that arrives in pieces: before a ``,`` or the closing bracket.

    A quote inside a string that a model forgot to escape does not close it: the text after it cannot follow a
    value.
    """

    depth: int = 0
    quote: str = ""
    """The quote that closes the open string."""
    ended: bool = False
    is_last: bool = False
    """Whether no more text will arrive."""

    def scan(self, text: str, position: int) -> int:
        """Index of the argument's end if ``ended`` is set, else of the position to continue from when more
        text arrives."""
        while mark := (_IN_STRING if self.quote else _OUTSIDE).search(text, position):
            begin = mark.start()
            reached = self._in_string(text, begin) if self.quote else self._outside(text, begin)
            if reached is None or self.ended:
                return begin
            position = reached
        return len(text)

    def _in_string(self, text: str, position: int) -> int | None:
        if text[position] == "\\":
            return position + 2 if position + 1 < len(text) or self.is_last else None
        if text.startswith(self.quote, position):
            closes = self._closes(text, position + len(self.quote))
            if closes is None:
                return None
            position += len(self.quote)
            self.quote = "" if closes else self.quote
            return position
        return None if self.quote.startswith(text[position:]) and not self.is_last else position + 1

    def _closes(self, text: str, position: int) -> bool | None:
        """Whether a quote before this position closes its string; None if that is not certain yet."""
        if len(self.quote) == 3:
            return True
        follows = (_BEHIND_NESTED if self.depth else _BEHIND_STRING).match(text, position)
        if follows is not None:
            return True
        if self.is_last:
            return not text[position:].strip(" \n\t)")
        return None if len(text) - position < _MAX_LOOK and _MAY_FOLLOW.fullmatch(text, position) else False

    def _outside(self, text: str, position: int) -> int | None:
        char = text[position]
        if char in "'\"":
            row = text[position : position + 3]
            if len(row) < 3 and row == len(row) * char and not self.is_last:
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

"""Halves of surrogate pairs in a JSON text: a client that cuts a text in the middle of a character leaves
one, and sends it again with every later turn. It stands for no character, so it is read as U+FFFD."""

from __future__ import annotations

import re

_ESCAPE = re.compile(
    rb"(?<!\\)(\\++)u(?:[dD][89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""A pair or a half of one, behind all backslashes that stand before it: of an even number none escapes it."""
_REPLACEMENT = rb"\ufffd"
_ENCODED = re.compile(rb"\xed[\xa0-\xbf]")
"""Begins a half that was written in UTF-8 as if it were a character."""


def without_halves(text: bytes) -> bytes:
    """The same JSON text in which every half is U+FFFD; pairs stay, and what is no escape."""
    if b"\xed" in text and _ENCODED.search(text):
        text = _decoded(text)
    if b"\\ud" in text or b"\\uD" in text:  # the pattern takes a hundred times as long
        text = _ESCAPE.sub(_mended, text)
    return text


def _mended(found: re.Match[bytes]) -> bytes:
    backslashes, low = found[1], found[2]
    is_escape = len(backslashes) % 2 == 1
    if low is not None:
        return found[0] if is_escape else found[0][: -len(low)] + _REPLACEMENT
    return backslashes[:-1] + _REPLACEMENT if is_escape else found[0]


def _decoded(text: bytes) -> bytes:
    """Halves that were encoded one by one, as the characters they make together; a lone one as U+FFFD."""
    try:
        halves = text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # no text at all: the parser will say so
        return text
    return halves.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()

"""Lone surrogates in a JSON text. A client that cuts a text inside a character leaves one, and resends it
with every later turn. It encodes no character, so it is read as U+FFFD."""

from __future__ import annotations

import re

_ESCAPE = re.compile(
    rb"(?<!\\)(\\++)u(?:[dD][89abAB][0-9a-fA-F]{2}(\\u[dD][c-fC-F][0-9a-fA-F]{2})?|[dD][c-fC-F][0-9a-fA-F]{2})"
)
"""Matches a pair or a lone surrogate with all backslashes before it: an even number does not escape it."""
_REPLACEMENT = rb"\ufffd"
_ENCODED = re.compile(rb"\xed[\xa0-\xbf]")
"""The start of a surrogate that was encoded in UTF-8 like a character."""


def without_lone_surrogates(text: bytes) -> bytes:
    """The JSON text with each lone surrogate replaced by U+FFFD."""
    if b"\xed" in text and _ENCODED.search(text):
        text = _decoded(text)
    if b"\\ud" in text or b"\\uD" in text:  # the pattern takes a hundred times as long
        text = _ESCAPE.sub(_mended, text)
    return text


def _mended(found: re.Match[bytes]) -> bytes:
    backslashes = found[1]
    low = found[2]
    is_escape = len(backslashes) % 2 == 1
    if low is not None:
        return found[0] if is_escape else found[0][: -len(low)] + _REPLACEMENT
    return backslashes[:-1] + _REPLACEMENT if is_escape else found[0]


def _decoded(text: bytes) -> bytes:
    """Decodes surrogates that were encoded one by one as pairs; a lone one becomes U+FFFD."""
    try:
        halves = text.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:  # not UTF-8: the parser reports it
        return text
    return halves.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()

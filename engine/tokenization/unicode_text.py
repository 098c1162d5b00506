"""Handles strings that are not valid Unicode: JSON escapes can write lone surrogates, which have no
encoding."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """Whether every character can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(text: str) -> str:
    """Returns the text with U+FFFD for each lone surrogate; a pair becomes its character."""
    return text if is_unicode(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

"""Texts that are not Unicode: JSON's escapes can write half of a surrogate pair, which has no encoding."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """Whether every character of it can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def readable(text: str) -> str:
    """The same text with U+FFFD for each half of a pair; two that belong together are their character."""
    return text if is_unicode(text) else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

"""Texts that are not Unicode: JSON's escapes can write half of a surrogate pair, which has no encoding."""

from __future__ import annotations


def is_unicode(text: str) -> bool:
    """Whether every character of it can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""Texts that a page stores once, however often they occur."""

from __future__ import annotations


class Strings:
    """Numbers texts in the order of their first occurrence."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def texts(self) -> list[str]:
        return list(self._numbers)

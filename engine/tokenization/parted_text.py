"""A message's content as one string that keeps its parts."""

from __future__ import annotations


class PartedText(str):
    """A string of joined ``parts``. Strings derived from it have no parts."""

    __slots__ = ("parts",)

    parts: list[str]

    @classmethod
    def of(cls, parts: list[str]) -> PartedText:
        text = cls("\n".join(parts))
        text.parts = parts
        return text

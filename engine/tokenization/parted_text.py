"""A message's content as one string that remembers its parts."""

from __future__ import annotations


class PartedText(str):
    """``parts`` joined. Strings derived from it have no parts."""

    __slots__ = ("parts",)

    parts: list[str]

    @classmethod
    def of(cls, parts: list[str]) -> PartedText:
        text = cls("\n".join(parts))
        text.parts = parts
        return text

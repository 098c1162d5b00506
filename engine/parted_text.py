"""A message's content as one text that still knows the parts it came in."""

from __future__ import annotations


class PartedText(str):
    """``parts`` joined. Whoever makes another text of it has no parts any more."""

    __slots__ = ("parts",)

    parts: list[str]

    @classmethod
    def of(cls, parts: list[str]) -> PartedText:
        text = cls("\n".join(parts))
        text.parts = parts
        return text

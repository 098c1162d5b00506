"""Pictures among the parts of a content, in the form for templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PICTURE_PART = {"type": "image"}


def is_picture_part(part: object) -> bool:
    """Whether a part is a placeholder for a picture."""
    return part == PICTURE_PART


def with_picture_texts(message: Mapping[str, Any], text: str, *, in_parts: bool) -> dict[str, Any]:
    """Returns the message with this text in place of each picture, as a part or within one string."""
    content = message.get("content")
    if not isinstance(content, list) or PICTURE_PART not in content:
        return dict(message)
    if not in_parts:
        return {**message, "content": joined(content, text)}
    return {**message, "content": [text if is_picture_part(part) else part for part in content]}


def joined(parts: Sequence[Any], text: str) -> str:
    """Joins parts to one text, with this text for pictures. A picture and its neighbors are joined directly,
    as models were trained; other texts are separated by a line end."""
    whole = ""
    after_text = False
    for part in parts:
        is_text = not is_picture_part(part)
        said = _text_in(part) if is_text else text
        whole += f"\n{said}" if is_text and after_text else said
        after_text = is_text
    return whole


def _text_in(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""

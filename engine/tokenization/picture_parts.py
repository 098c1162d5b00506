"""Pictures among the parts of a content, as templates are given them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PICTURE_PART = {"type": "image"}


def is_picture_part(part: object) -> bool:
    """Whether a part stands for a picture."""
    return part == PICTURE_PART


def with_picture_texts(message: Mapping[str, Any], text: str, *, in_parts: bool) -> dict[str, Any]:
    """The message with this text in place of each picture, as a part or within one string."""
    content = message.get("content")
    if not isinstance(content, list) or PICTURE_PART not in content:
        return dict(message)
    if not in_parts:
        return {**message, "content": joined(content, text)}
    return {**message, "content": [text if is_picture_part(part) else part for part in content]}


def joined(parts: Sequence[Any], text: str) -> str:
    """Parts as one text, with this one for pictures. What is next to a picture follows at once, as models
    have learned; other texts are divided by the end of a line."""
    whole, after_text = "", False
    for part in parts:
        is_text = not is_picture_part(part)
        said = _text_in(part) if is_text else text
        whole += f"\n{said}" if is_text and after_text else said
        after_text = is_text
    return whole


def _text_in(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""

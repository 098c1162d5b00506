"""Pictures and clips among the parts of a content, in the form for templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.records.media import MediaKind

MEDIA_PARTS = {kind: {"type": str(kind)} for kind in MediaKind}
"""The part that stands for a picture or clip."""


def kind_of_part(part: object) -> MediaKind | None:
    """The kind for which a part is a placeholder; None for other parts."""
    return next((kind for kind, placeholder in MEDIA_PARTS.items() if part == placeholder), None)


def with_media_texts(
    message: Mapping[str, Any], texts: Mapping[MediaKind, str], *, in_parts: bool
) -> dict[str, Any]:
    """Returns the message with its kind's text in place of each picture and clip, as a part or within one
    string."""
    content = message.get("content")
    if not isinstance(content, list) or all(kind_of_part(part) is None for part in content):
        return dict(message)
    if not in_parts:
        return {**message, "content": joined(content, texts)}
    kinds = [kind_of_part(part) for part in content]
    shown = [part if kind is None else texts[kind] for kind, part in zip(kinds, content, strict=True)]
    return {**message, "content": shown}


def joined(parts: Sequence[Any], texts: Mapping[MediaKind, str]) -> str:
    """Joins parts to one text, with these texts for media. These and their neighbors are joined directly, as
    models were trained; other texts are separated by a line end."""
    whole = ""
    after_text = False
    for part in parts:
        kind = kind_of_part(part)
        said = _text_in(part) if kind is None else texts[kind]
        whole += f"\n{said}" if kind is None and after_text else said
        after_text = kind is None
    return whole


def _text_in(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""

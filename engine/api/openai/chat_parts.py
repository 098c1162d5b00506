"""Marks pictures and clips, and replaces or refuses other parts that are no text, before rendering."""

from __future__ import annotations

from engine.api.prompt.chat_messages import TEXT_PARTS, Message
from engine.api.prompt.left_out import LeftOut, refuse_part

_SHOWING_ROLES = ("user", "tool", "function")


def texts_only(messages: list[Message], left_out: LeftOut) -> list[Message]:
    """Returns the messages with a mark for each picture and clip that the model is shown, and a line of
    text for each part of another kind. Pictures are shown in messages of users and tools.

    RequestError for such a part in the user's last message, unless it follows tool results: agents put the
    output of a tool into a separate message.
    """
    new = len(messages) - 1 if _ends_with_own(messages) else None
    return [
        _with_texts(message, f"messages[{index}].content", left_out, is_new=index == new)
        if isinstance(message.get("content"), list)
        else message
        for index, message in enumerate(messages)
    ]


def _ends_with_own(messages: list[Message]) -> bool:
    """Whether the user wrote the last message."""
    roles = [message.get("role") for message in messages[-2:]]
    return roles[-1:] == ["user"] and roles[0] not in ("tool", "function")


def _with_texts(message: Message, where: str, left_out: LeftOut, *, is_new: bool) -> Message:
    shows = message.get("role") in _SHOWING_ROLES
    content = [
        _text(part, f"{where}[{index}]", left_out, is_new=is_new, shows=shows)
        for index, part in enumerate(message["content"])
    ]
    return {**message, "content": content}


def _text(part: object, where: str, left_out: LeftOut, *, is_new: bool, shows: bool) -> object:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str) or kind in TEXT_PARTS:
        return part  # malformed parts are reported later
    if shows and (mark := left_out.mark(part, where, is_new=is_new)) is not None:
        return {"type": "text", "text": mark}
    if is_new:
        raise refuse_part(kind, where, left_out)
    return {"type": "text", "text": left_out.part(part, where)}

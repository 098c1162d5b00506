"""Renders a conversation whose last message continues: text that a template writes after the message's text
is cut off.

The text is marked at its end, and the rendered conversation cut at the mark, as in transformers.
"""

from __future__ import annotations

from typing import Any

_MARK = "THE_MODEL_GOES_ON_FROM_HERE "
"""Its trailing blank shows whether the template strips the text."""


def with_mark(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with the mark after the last one's text; ValueError if that has no text."""
    last = dict(messages[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _MARK
    else:
        last["content"] = _parts_with_mark(content)
    return [*messages[:-1], last]


def _parts_with_mark(content: Any) -> list[Any]:
    parts = list(content) if isinstance(content, list) else []
    number = _last_text(parts)
    parts[number] = {**parts[number], "text": parts[number]["text"] + _MARK}
    return parts


def _last_text(parts: list[Any]) -> int:
    """The index of the last part that is text."""
    for number in reversed(range(len(parts))):
        if isinstance(parts[number], dict) and isinstance(parts[number].get("text"), str):
            return number
    raise ValueError("the last message has no text to continue.")


def cut_at_mark(rendered: str, message: dict[str, Any]) -> str:
    """Returns a rendered conversation up to the end of the text of ``message``, the last. ValueError if the
    template omits the text."""
    found = rendered.rfind(_MARK.rstrip())
    if found < 0 or _text_of(message).strip() not in rendered:
        raise ValueError("the chat template leaves out the message to continue, or a part of it.")
    open_text = rendered[:found]
    keeps_blanks = rendered.startswith(_MARK, found)
    return open_text if keeps_blanks else open_text.rstrip()


def _text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    text: str = content if isinstance(content, str) else content[_last_text(content)]["text"]
    return text

"""The prompt of a chat whose last message may still grow, such as the first lines of a tool's result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_LAST_WORD = re.compile(r"(\w{1,64})\W*\Z")
"""Templates may trim and escape what is around words."""
MAX_TAIL_CHARS = 256
"""Characters at the end of the last message in which a word is looked for."""


def without_end(text: str, messages: Sequence[dict[str, Any]]) -> str:
    """A rendered chat up to the last word of its last message: what the template writes behind it would
    separate it from what follows. The whole text if the message does not end with words."""
    word = _LAST_WORD.search(_last_text(messages[-1])[-MAX_TAIL_CHARS:]) if messages else None
    at = -1 if word is None else text.rfind(word[1])
    return text if word is None or at < 0 else text[: at + len(word[1])]


def _last_text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = content[-1].get("text") if content and isinstance(content[-1], dict) else None
    return content if isinstance(content, str) else ""

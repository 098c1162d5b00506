"""A tool call's arguments in a conversation's history: sent as text, given to templates as an object.

Only what a template can print back is read. The rest stays the text that the model wrote: the history of a
job must not become unservable by one bad call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from engine.unicode_text import is_unicode

INVALID_JSON = "INVALID_JSON"
"""The member of a call's arguments that holds all that a model wrote where that was no JSON object."""
MAX_DEPTH = 64
"""Of lists and objects in each other; templates and their filters go down by recursion."""


def read_arguments(text: str) -> object:
    """What the text says as JSON; the text itself where that could not be printed, or the model's own where
    that was no JSON: it is rendered to the tokens that were generated."""
    try:
        value = _parsed(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict) and isinstance(value.get(INVALID_JSON), str):
        return value[INVALID_JSON]
    is_flat = text.count("{") + text.count("[") <= MAX_DEPTH or _is_flat(value)
    return value if is_flat else text


def _parsed(text: str) -> object:
    """As json.loads has it, which also takes what is not quite JSON; an agent's history has hundreds."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return _unicode_only(json.loads(text))


def _unicode_only(value: object) -> object:
    """ValueError if a text in it is none: only json.loads lets halves of surrogate pairs through."""
    if not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ValueError("half of a surrogate pair")
    return value


def _is_flat(value: object) -> bool:
    """Whether lists and objects in it are at most MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for container in level for item in _items(container)]
        if not level:
            return True
    return False


def _items(value: object) -> Iterable[object]:
    """What a list or an object holds; of other values nothing."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()

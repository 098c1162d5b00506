"""Tool call arguments in a conversation's history: sent as text, passed to templates as objects.

Only arguments that a template can print again are parsed. Others stay the text that the model wrote: one bad
call must not make a job's history unservable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import msgspec

from engine.tokenization.unicode_text import is_unicode

INVALID_JSON = "INVALID_JSON"
"""The key under which arguments have the model's whole text if that was not a JSON object."""
MAX_DEPTH = 64
"""Maximum nesting of lists and objects, since templates and their filters recurse."""


def read_arguments(text: str) -> object:
    """Returns the parsed arguments; the text itself if it could not be printed, or the model's own text if
    that was not a JSON object: it renders to the tokens that were generated."""
    try:
        value = _parsed(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict) and isinstance(value.get(INVALID_JSON), str):
        return value[INVALID_JSON]
    is_flat = text.count("{") + text.count("[") <= MAX_DEPTH or _is_flat(value)
    return value if is_flat else text


def _parsed(text: str) -> object:
    """Parses like json.loads, which also accepts text that is not strict JSON, but faster: a history has
    hundreds of calls."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return _unicode_only(json.loads(text))


def _unicode_only(value: object) -> object:
    """Raises ValueError for a string with lone surrogates, which only json.loads accepts."""
    if not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise ValueError("half of a surrogate pair")
    return value


def _is_flat(value: object) -> bool:
    """Whether the nesting is at most MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [item for container in level for item in _items(container)]
        if not level:
            return True
    return False


def _items(value: object) -> Iterable[object]:
    """The values of a list or an object; none for other values."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()

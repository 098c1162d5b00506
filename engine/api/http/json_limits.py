"""Limits of a JSON text beyond its schema: the number of values, and the size of integers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from engine.errors import RequestError

MAX_JSON_VALUES = 1_000_000
"""Enough for a prompt of a million tokens. A parsed value takes many times its bytes: 32 MiB of ``[],`` would
be eleven million objects."""

_COMMA_OR_STRING = re.compile(rb',|"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_ALL_DIGITS_0 = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_INTEGER = re.compile(rb"(?<=[\s:,\[-])[0-9]{19,}(?=[\s,\]}])")


def check_json(text: bytes) -> None:
    """Raises RequestError for a text that is too large to parse; invalid JSON may pass."""
    _check_num_values(text)
    if _may_hold_long_integer(text) and _LONG_INTEGER.search(text):  # in a string, perhaps
        _check_integers(text)


def _may_hold_long_integer(text: bytes) -> bool:
    """Whether a cheap test finds a possible long integer: it takes a tenth of the time of the pattern."""
    return b"0" * 19 in text.translate(_ALL_DIGITS_0)


def _check_num_values(text: bytes) -> None:
    # The usual case; the count includes commas inside strings.
    if len(text) < MAX_JSON_VALUES or text.count(b",") < MAX_JSON_VALUES:
        return
    num_commas = num_strings = 0
    for found in _COMMA_OR_STRING.finditer(text):
        if found[0] == b",":
            num_commas += 1
        else:
            num_strings += 1
        if num_commas >= MAX_JSON_VALUES or num_strings > 2 * MAX_JSON_VALUES:
            raise RequestError(f"The request's body holds more than {MAX_JSON_VALUES} JSON values.")


_SCHEMAS = frozenset({"tools", "response_format", "text", "output_config", "output_format"})
"""Fields that hold JSON schemas, which are passed on as text, so their integers may have any size."""


def _check_integers(text: bytes) -> None:
    """Raises RequestError for integers beyond 64 bits, which messages between processes cannot
    hold."""
    try:
        body = json.loads(text, parse_int=_as_integer)
    except (ValueError, RecursionError):
        return  # the real parser reports the error
    if isinstance(body, dict):
        body = {key: value for key, value in body.items() if key not in _SCHEMAS}
    for path in _too_large(body, ""):
        raise RequestError(f"{path} must fit in 64 bits.", path)


def _as_integer(digits: str) -> int:
    return int(digits) if len(digits) < 40 else 2**100  # Python refuses integers of thousands of digits


def _too_large(value: object, path: str) -> Iterator[str]:
    """Yields the paths of integers beyond 64 bits."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _too_large(item, f"{path}.{key[:100]}" if path else key[:100])
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _too_large(item, f"{path}[{index}]")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        yield path or "The body"

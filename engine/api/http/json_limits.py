"""What may be in a JSON text beside what its schema says: how many values, and integers of which size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from engine.errors import RequestError

MAX_JSON_VALUES = 1_000_000
"""A prompt of a million tokens. A value once read costs many times its bytes: 32 MiB of ``[],`` would be
eleven million objects."""

_COMMA_OR_STRING = re.compile(rb',|"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_ALL_DIGITS_0 = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_INTEGER = re.compile(rb"(?<=[\s:,\[-])[0-9]{19,}(?=[\s,\]}])")


def check_json(text: bytes) -> None:
    """RequestError if there is too much in it for the server; what is not JSON at all may pass."""
    _check_num_values(text)
    if _may_hold_long_integer(text) and _LONG_INTEGER.search(text):  # in a string, perhaps
        _check_integers(text)


def _may_hold_long_integer(text: bytes) -> bool:
    """Told in a tenth of the time that the pattern takes."""
    return b"0" * 19 in text.translate(_ALL_DIGITS_0)


def _check_num_values(text: bytes) -> None:
    # Most texts; this counts the commas inside strings too.
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
"""Fields that hold JSON schemas, which go as text: their bounds may be of any size."""


def _check_integers(text: bytes) -> None:
    """The engine's processes tell each other integers of 64 bits."""
    try:
        body = json.loads(text, parse_int=_as_integer)
    except (ValueError, RecursionError):
        return  # the parser proper will say what is wrong
    if isinstance(body, dict):
        body = {key: value for key, value in body.items() if key not in _SCHEMAS}
    for path in _too_large(body, ""):
        raise RequestError(f"{path} must fit in 64 bits.", path)


def _as_integer(digits: str) -> int:
    return int(digits) if len(digits) < 40 else 2**100  # of thousands of digits Python reads none


def _too_large(value: object, path: str) -> Iterator[str]:
    """Where such integers are."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _too_large(item, f"{path}.{key[:100]}" if path else key[:100])
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _too_large(item, f"{path}[{index}]")
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        yield path or "The body"

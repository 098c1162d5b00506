"""Limits of the numbers in a line of a trace: tables store them in 32 or 64 bits, and times are added up."""

from __future__ import annotations

import re

import msgspec

MAX_COUNT = 2**31 - 1
MAX_LONG = 2**53
MAX_FLOAT = 1e15
LONG = {"step", "pin_id", "priority", "written", "dropped", "num_events_before"}
"""Fields with higher limits than others."""

_SUSPECT = re.compile(rb"[:,\[][ \t]*-?(?:[0-9]{10}|[0-9.]+[eE]\+?[0-9])")
"""Matches a number of ten digits before the point, or with an exponent; few lines have one."""


def check_numbers(line: bytes) -> None:
    """Raises msgspec.ValidationError, as for a wrong type, if a number is beyond its limit."""
    if _SUSPECT.search(line) is not None:
        _check(msgspec.json.decode(line), "")


def _check(value: object, name: str) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            _check(each, str(key))
    elif isinstance(value, list):
        for each in value:
            _check(each, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        _within(value, name, MAX_LONG if name in LONG else MAX_COUNT)
    elif isinstance(value, float):
        _within(value, name, MAX_FLOAT)


def _within(value: float, name: str, most: float) -> None:
    if abs(value) > most:
        told = str(value) if len(str(value)) <= 24 else f"{str(value)[:20]}..."
        raise msgspec.ValidationError(f"{name} is {told}, beyond {most:,.0f}")

"""A section of flags that fill configuration records, and the value types of flags."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


class FlagGroup:
    """A titled section of a parser; its flags take their names and defaults from the records' fields."""

    def __init__(
        self, parser: argparse.ArgumentParser, title: str, *records: type[Any], text: str | None = None
    ) -> None:
        self.flags = parser.add_argument_group(title, text)
        self._defaults = {name: value for one in records for name, value in defaults_of(one).items()}

    def add(
        self,
        name: str,
        text: str,
        kind: Callable[[str], Any] = str,
        metavar: str | None = None,
        choices: Sequence[str] | None = None,
        short: str | None = None,
    ) -> None:
        """Adds ``--name VALUE``."""
        self.flags.add_argument(
            *(() if short is None else (short,)),
            flag_of(name),
            type=kind,
            default=self._defaults[name],
            metavar=metavar,
            choices=choices,
            help=text,
        )

    def add_names(self, name: str, text: str, metavar: str) -> None:
        """Adds ``--name A,B``."""
        self.flags.add_argument(
            flag_of(name), type=names, default=argparse.SUPPRESS, metavar=metavar, help=text
        )

    def add_switch(self, name: str, text: str) -> None:
        """Adds ``--name`` and ``--no-name``."""
        self.flags.add_argument(
            flag_of(name), action=argparse.BooleanOptionalAction, default=self._defaults[name], help=text
        )


def defaults_of(record: type[Any]) -> dict[str, Any]:
    """The defaults of a dataclass's fields that have one."""
    return {
        field.name: field.default
        for field in dataclasses.fields(record)
        if field.default is not dataclasses.MISSING
    }


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def number(text: str) -> int:
    """Parses ``4096``, ``32k`` (thousands) or ``2G`` (powers of 1024), like vLLM."""
    unit = _UNITS.get(text[-1:], 1)
    digits = text if unit == 1 else text[:-1]
    try:
        return int(digits) if unit == 1 else int(float(digits) * unit)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 32k or 2G") from None


def in_units(size: int) -> str:
    """Formats a size for ``number``: ``32M`` for 32 * 2**20."""
    for unit in "GMK":
        if size and size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def names(text: str) -> tuple[str, ...]:
    """Parses names separated by commas, or a JSON list of names, like vLLM."""
    if not text.startswith("["):
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        return tuple(str(name) for name in json.loads(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names") from None

"""Reads an option, given as vLLM V1's JSON or as a mapping with the same fields, into its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from engine.errors import ConfigError

Record = TypeVar("Record")


def read_fields(option: str, given: str | Mapping[str, Any], example: str) -> dict[str, Any]:
    """The fields that were given; ConfigError if ``given`` is text but not a JSON object."""
    if not isinstance(given, str):
        return dict(given)
    try:
        return msgspec.json.decode(given.encode(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{option} must be a JSON object such as {example}, got {given!r}.") from error


def check_names(option: str, fields: Mapping[str, Any], record: type[Any]) -> None:
    """Raise ConfigError, which lists the known names, for a field that the record does not have."""
    known = [field.name for field in dataclasses.fields(record)]
    for name in fields:
        if name not in known:
            raise ConfigError(f"{option}: unknown field {name!r}; choose from {', '.join(sorted(known))}.")


def make_record(option: str, fields: Mapping[str, Any], record: type[Record]) -> Record:
    """The record of these fields; ConfigError names the field that is wrong."""
    try:
        return msgspec.convert(fields, record)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{option}: {_sentence(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _sentence(error: msgspec.ValidationError) -> str:
    """``Expected `int`, got `str` - at `$.name` `` with the name in front."""
    expected, _, place = str(error).partition(" - at ")
    name = place.strip("`").removeprefix("$.")
    return f"{name}: {expected[:1].lower()}{expected[1:]}.".replace("`", "") if name else f"{expected}."

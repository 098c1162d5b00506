"""Reads ``speculative_config`` as users write it: vLLM V1's JSON, or the same as a mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from engine.config import METHODS_WITH_WEIGHTS, SpeculativeConfig
from engine.errors import ConfigError

LOOKUPS = ("prompt_lookup_min", "prompt_lookup_max")
DRAFTS_OF_WEIGHTS = 3
"""Most drafts in a step by default of a drafter with weights, to which each costs a pass."""


def read_speculative_config(
    given: str | Mapping[str, Any] | SpeculativeConfig | None,
) -> SpeculativeConfig | None:
    """The record of what was given, JSON or fields; ConfigError names the field that is wrong."""
    if given is None or isinstance(given, SpeculativeConfig):
        return given
    fields = _object_of(given) if isinstance(given, str) else dict(given)
    known = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    for name in fields:
        if name not in known:
            raise ConfigError(
                f"speculative_config: unknown field {name!r}; choose from {', '.join(sorted(known))}."
            )
    for name, other in (LOOKUPS, LOOKUPS[::-1]):  # as in V1, the one that is left out is the other
        if name not in fields and other in fields:
            fields[name] = fields[other]
    if fields.get("method") in METHODS_WITH_WEIGHTS:
        fields.setdefault("num_speculative_tokens", DRAFTS_OF_WEIGHTS)
    try:
        return msgspec.convert(fields, SpeculativeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"speculative_config: {_sentence(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"speculative_config: {error}") from error


def _object_of(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text.encode(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f'speculative_config must be a JSON object such as {{"method": "suffix"}}, got {text!r}.'
        ) from error


def _sentence(error: msgspec.ValidationError) -> str:
    """``Expected `int`, got `str` - at `$.name` `` with the name in front."""
    expected, _, place = str(error).partition(" - at ")
    name = place.strip("`").removeprefix("$.")
    return f"{name}: {expected[:1].lower()}{expected[1:]}.".replace("`", "") if name else f"{expected}."

"""Checks that configuration records share."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import ConfigError


def one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")


def at_least(name: str, value: float, limit: float) -> None:
    if value < limit:
        raise ConfigError(f"{name} must be at least {limit}, got {value}.")

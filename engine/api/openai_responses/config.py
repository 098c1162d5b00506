"""Limits of the Responses API's storage and background work."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesConfig:
    """Limits on stored and on background responses."""

    max_stored_responses: int = 10_000
    """Maximum number of stored responses that have ended, over all API server processes; the least recently
    used are dropped."""
    max_stored_response_bytes: int = 256 * 2**20
    max_background_responses: int = 64
    """Maximum number of background responses that run in one API server process; more are answered with
    503."""

    def __post_init__(self) -> None:
        for name in ("max_stored_responses", "max_stored_response_bytes", "max_background_responses"):
            limit = getattr(self, name)
            if limit < 1:
                raise ConfigError(f"{name} must be at least 1, got {limit}.")

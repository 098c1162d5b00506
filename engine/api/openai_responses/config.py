"""How much the Responses API may keep and do on its own."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesConfig:
    """Bounds of what is kept between turns and made in the background."""

    max_stored_responses: int = 10_000
    """That have ended, over all front-end processes; the least recently used are forgotten first."""
    max_stored_response_bytes: int = 256 * 2**20
    max_background_responses: int = 64
    """Being made at once by one front-end process; beyond: 503."""

    def __post_init__(self) -> None:
        for name in ("max_stored_responses", "max_stored_response_bytes", "max_background_responses"):
            limit = getattr(self, name)
            if limit < 1:
                raise ConfigError(f"{name} must be at least 1, got {limit}.")

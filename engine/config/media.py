"""Configures which hosts pictures and clips may be fetched from, how many a prompt may have, and their
memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config.json_options import read_fields
from engine.errors import ConfigError

_HOST = re.compile(r"[A-Za-z0-9.:_-]+")
_PIXEL_LIMITS = ("min_pixels", "max_pixels")
_COUNTS = {"image": "max_pictures", "audio": "max_clips"}
"""The fields of ``ModelConfig`` for the number of each kind in a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Options for pictures and clips of one API server process."""

    allowed_media_domains: tuple[str, ...] = ()
    """Full names of the hosts from which files at http and https URLs are fetched; none by default. A
    private address is reached only if it is itself in the list."""
    mm_processor_cache_gb: float = 4.0
    """Memory for pixels and samples that no request holds any longer, in GiB."""

    def __post_init__(self) -> None:
        for host in self.allowed_media_domains:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"allowed_media_domains must be host names without scheme, got {host!r}.")
        if not 0 <= self.mm_processor_cache_gb < 2**20:
            raise ConfigError(
                f"mm_processor_cache_gb must not be negative, got {self.mm_processor_cache_gb:g}."
            )

    @property
    def max_idle_bytes(self) -> int:
        """Maximum number of bytes of pixels and samples kept for later requests."""
        return int(self.mm_processor_cache_gb * 2**30)


def media_limits(
    limit_mm_per_prompt: str | Mapping[str, Any] | None,
    mm_processor_kwargs: str | Mapping[str, Any] | None,
    language_model_only: bool | None = False,
) -> dict[str, int]:
    """The fields of ``ModelConfig`` that V1's options set. ConfigError for unsupported values."""
    limits: dict[str, int] = {}
    per_prompt = _fields("limit_mm_per_prompt", limit_mm_per_prompt, '{"image": 8}')
    if unknown := sorted(per_prompt.keys() - {"image", "video", "audio"}):
        raise ConfigError(f"limit_mm_per_prompt must not set {unknown[0]!r}; it takes image and audio.")
    for kind, count in per_prompt.items():
        if not _is_count(count):
            raise ConfigError(f"limit_mm_per_prompt: {kind} must be a number from 0, got {count!r}.")
        if kind == "video" and count:
            raise ConfigError(
                "limit_mm_per_prompt: video must be 0: this server takes pictures and audio only."
            )
        if kind in _COUNTS:
            limits[_COUNTS[kind]] = count
    kwargs = _fields("mm_processor_kwargs", mm_processor_kwargs, '{"max_pixels": 1003520}')
    for name, value in kwargs.items():
        if name not in _PIXEL_LIMITS:
            raise ConfigError(
                f"mm_processor_kwargs must not set {name!r}; it takes {' and '.join(_PIXEL_LIMITS)}."
            )
        if not _is_count(value) or not value:
            raise ConfigError(f"mm_processor_kwargs: {name} must be a number from 1, got {value!r}.")
        limits[name] = value
    if limits.get("min_pixels", 0) > limits.get("max_pixels", 2**63):
        raise ConfigError("mm_processor_kwargs: min_pixels must not exceed max_pixels.")
    if language_model_only:
        limits |= dict.fromkeys(_COUNTS.values(), 0)
    return limits


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _fields(option: str, given: str | Mapping[str, Any] | None, example: str) -> dict[str, Any]:
    return {} if given is None else read_fields(option, given, example)

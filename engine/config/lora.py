"""Configures LoRA adapters: ``--enable-lora``, ``--lora-modules`` and their limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.config.checks import at_least
from engine.errors import ConfigError, RequestError
from engine.records.adapters import MAX_RANK, Adapter, find_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAConfig:
    """Adapters of one base model that run together."""

    modules: tuple[Adapter, ...] = ()
    """Adapters that are loaded at startup."""
    max_loras: int = 1
    """Most adapters of running requests; requests of further ones wait."""
    max_lora_rank: int = 16
    """Highest rank of an adapter."""
    max_cpu_loras: int | None = None
    """Most adapters in host memory; the least recently used is dropped, and read again when a request names
    it. None: no limit."""

    def __post_init__(self) -> None:
        at_least("max_loras", self.max_loras, 1)
        at_least("max_lora_rank", self.max_lora_rank, 1)
        if self.max_lora_rank > MAX_RANK:
            raise ConfigError(f"max_lora_rank must be at most {MAX_RANK}, got {self.max_lora_rank}.")
        if self.max_cpu_loras is not None:
            at_least("max_cpu_loras", self.max_cpu_loras, self.max_loras)


def read_lora_config(
    *,
    enable_lora: bool = False,
    lora_modules: Sequence[str] | None = None,
    max_loras: int | None = None,
    max_lora_rank: int | None = None,
    max_cpu_loras: int | None = None,
) -> LoRAConfig | None:
    """The record of V1's options; None if adapters are off. ConfigError if one of them is wrong, or needs
    ``enable_lora``. ``lora_modules``: ``NAME=PATH`` each."""
    given = {"max_loras": max_loras, "max_lora_rank": max_lora_rank, "max_cpu_loras": max_cpu_loras}
    options = {name: value for name, value in given.items() if value is not None}
    if not enable_lora:
        for name in ("lora_modules",) if lora_modules else options:
            raise ConfigError(f"{name} needs enable_lora.")
        return None
    modules = tuple(_configured(module) for module in lora_modules or ())
    if len({module.name for module in modules}) < len(modules):
        raise ConfigError("lora_modules: two adapters have the same name.")
    return LoRAConfig(modules=modules, **options)


def _configured(module: str) -> Adapter:
    name, equals, path = module.partition("=")
    if not equals or not path:
        raise ConfigError(f"lora_modules must be NAME=PATH, got {module!r}.")
    try:
        return find_adapter(name, path)
    except RequestError as error:
        raise ConfigError(f"lora_modules: {error}") from error

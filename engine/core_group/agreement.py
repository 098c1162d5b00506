"""The settings that all engine cores of a group must share, on whichever machine they run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.config.engine_config import EngineConfig
from engine.version import package_version


def settings_of(config: EngineConfig) -> dict[str, str]:
    """The settings by the names of their options. A model folder counts by its name, not its path."""
    model = config.model
    cache = config.cache
    return {
        "version": package_version(),
        "model": Path(model.model).name,
        "dtype": model.dtype,
        "quantization": str(model.quantization),
        "max_model_len": str(model.max_model_len),
        "seed": str(model.seed),
        "block_size": str(cache.block_size),
        "kv_cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "data_parallel_size": str(config.parallel.data_parallel_size),
        "speculative_config": str(config.speculative),
        "enable_expert_parallel": str(model.enable_expert_parallel),
    }


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """A sentence on the first setting that differs; None if none does."""
    for name in ours.keys() | theirs.keys():
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name)!r} on the head, but {theirs.get(name)!r} on the node"
    return None

"""What all engine cores of a group must have in common, whichever machine they run on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.config import EngineConfig
from engine.version import package_version


def settings_of(config: EngineConfig) -> dict[str, str]:
    """By the names of the options. A model folder goes by its name, wherever it lies."""
    model, cache = config.model, config.cache
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
    """A sentence on the first setting that is not the same; None if all are."""
    for name in ours.keys() | theirs.keys():
        if ours.get(name) != theirs.get(name):
            return f"{name} is {ours.get(name)!r} on the head, but {theirs.get(name)!r} on the node"
    return None

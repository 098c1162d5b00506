"""Host memory for offloaded KV, as configured by vLLM V1's ``kv_transfer_config``."""

from __future__ import annotations

from dataclasses import replace

from engine.config.engine_config import CacheConfig
from engine.config.kv_transfer import KVTransferConfig
from engine.errors import ConfigError


def with_offloading(cache: CacheConfig, kv_transfer: KVTransferConfig | None) -> CacheConfig:
    """The cache of an engine whose connector offloads to host memory; ConfigError if that is configured
    twice."""
    if kv_transfer is None or kv_transfer.offloading_gib is None:
        return cache
    if cache.has_host_tier:
        raise ConfigError(
            "kv_offloading_size and the OffloadingConnector of kv_transfer_config cannot both be set."
        )
    return replace(cache, kv_offloading_size=kv_transfer.offloading_gib)

"""The configuration of each core of a group: the same, but with separate files."""

from __future__ import annotations

from dataclasses import replace

from engine.config.engine_config import CacheConfig, EngineConfig, TraceConfig
from engine.config.engine_files import path_of_engine
from engine.core_process.core_start import CoreSpec


def spec_of_engine(spec: CoreSpec, index: int) -> CoreSpec:
    """The spec from which one core of the group is built."""
    return replace(spec, config=config_of_engine(spec.config, index))


def config_of_engine(config: EngineConfig, index: int) -> EngineConfig:
    """The configuration of one core. The first core's files have the given names, the others' include the
    core's number."""
    return replace(
        config,
        parallel=replace(config.parallel, data_parallel_rank=index),
        trace=_trace_of_engine(config.trace, index),
        cache=_cache_of_engine(config.cache, index),
    )


def _trace_of_engine(trace: TraceConfig, index: int) -> TraceConfig:
    return replace(
        trace,
        trace_path=path_of_engine(trace.trace_path, index),
        trace_dir=path_of_engine(trace.trace_dir, index),
    )


def _cache_of_engine(cache: CacheConfig, index: int) -> CacheConfig:
    return replace(cache, kv_offloading_disk_path=path_of_engine(cache.kv_offloading_disk_path, index))

"""The KV cache groups of the model of a recorded trace."""

from __future__ import annotations

from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from tracing.events import TraceHeader


def recorded_groups(header: TraceHeader) -> tuple[KVCacheGroup, ...]:
    """Returns the groups, each with one layer: no decision depends on the number of layers."""
    windows = header.kv_group_windows
    chunks = header.kv_group_chunks or [0] * len(windows)
    groups = (
        tuple(
            KVCacheGroup((i,), window or None, chunk or None)
            for i, (window, chunk) in enumerate(zip(windows, chunks, strict=True))
        )
        or ONE_FULL_GROUP
    )
    if not header.num_states:
        return groups
    return (*groups, KVCacheGroup((0,), state_blocks=header.state_blocks))

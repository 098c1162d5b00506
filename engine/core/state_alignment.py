"""Lets steps end where the state of a request is to be kept, for models whose layers have states."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.parts import Batch, ChunkLimit, SchedulerPart
from engine.core.request import Request
from engine.core.step import Step


class StateAlignment(SchedulerPart, ChunkLimit):
    """The part, and its limit of every step."""

    def __init__(self, kv: KVCacheManager) -> None:
        """``kv`` has states, and caches prefixes."""
        self._kv = kv

    def limit(self, step: Step, batch: Batch, inner: tuple[ChunkLimit, ...]) -> ChunkLimit:
        return self

    def cut(self, request: Request, start: int, num_tokens: int, hit: Sequence[KVCacheBlock] | None) -> int:
        return self._kv.aligned(request, num_tokens, hit)

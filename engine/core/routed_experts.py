"""Keeps the experts of each computed token like its KV, so that a prefix-cache hit finds them, too."""

from __future__ import annotations

import numpy as np

from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.parts import SchedulerPart
from engine.core.request import Request
from engine.records.messages import EngineCoreOutput
from engine.records.routed_experts import RoutedExperts, RoutedExpertsSpec


class RoutedExpertsStore(SchedulerPart):
    """The experts of every slot of the pool: num_blocks * block_size * ``bytes_per_token`` bytes.

    A slot is written when its step returns, in the order of steps, and read while its request holds the
    block. The first KV cache group must be one of full attention, whose blocks a request keeps to its end.
    """

    def __init__(self, spec: RoutedExpertsSpec, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._by_slot = spec.empty(num_blocks * block_size)

    def take(self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float) -> None:
        """Keep the experts that a step chose."""
        if result.routing is not None:
            self._by_slot[result.routing.slots] = result.routing.experts

    def fill_output(self, request: Request, output: EngineCoreOutput, kv: KVCacheManager) -> None:
        output.routed_experts = self.of(request, kv)

    def of(self, request: Request, kv: KVCacheManager) -> RoutedExperts | None:
        """The experts of an ending request's tokens from ``routed_experts_prompt_start`` on, except for the
        last token, which is never computed.

        None if it did not end by itself, or has lost its blocks while its last token was under way.
        """
        if not request.status.complete or not request.num_output_tokens:
            return None
        num_tokens = request.num_tokens - 1
        block_ids = kv.block_ids(request.request_id)[:: kv.num_groups]
        if len(block_ids) * self._block_size < num_tokens:
            return None
        first_slots = np.array(block_ids, dtype=np.int64) * self._block_size
        slots = (first_slots[:, None] + np.arange(self._block_size)).ravel()[:num_tokens]
        start = request.sampling_params.routed_experts_prompt_start
        return RoutedExperts.of(self._by_slot[slots[start:]])

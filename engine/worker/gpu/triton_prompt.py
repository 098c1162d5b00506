"""Prefill attention by our Triton kernel over the pages themselves: the fallback that always works."""

from __future__ import annotations

import torch

from engine.worker.gpu.kv_splits import KvSplitter
from engine.worker.gpu.step_batch import StepBatch
from engine.worker.gpu.tiling import Tiling
from engine.worker.gpu.triton_attention import Pages, Scoring, attend_prompts


class TritonPromptAttention:
    """A PromptAttention by ``triton_attention``."""

    def __init__(self, tiling: Tiling, splitter: KvSplitter, kv_scale: float) -> None:
        self._tiling = tiling
        self._splitter = splitter
        self._kv_scale = kv_scale

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See PromptAttention. The KV of few queries after a long context is split, as for decode."""
        scoring = Scoring(scale, window, soft_cap, sinks, self._kv_scale, chunk)
        output = query.new_empty(query.shape)
        num_tokens, num_heads, _ = query.shape
        splits = self._splitter.choose(
            num_programs=-(-num_tokens * num_heads // self._tiling.num_rows),
            num_rows=num_tokens * num_heads,
            longest=max(scoring.num_seen(chunk.seq_len, chunk.query_len) for chunk in batch.prompts),
        )
        attend_prompts(output, query, Pages(keys, values), batch, scoring, self._tiling, splits)
        return output

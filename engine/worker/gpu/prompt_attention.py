"""Attention of prompts, whose many query tokens are worth a kernel that knows no pages."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.worker.gpu.step_batch import StepBatch


class PromptAttention(Protocol):
    """Attends the prompts of a step; their K and V are in the pool already."""

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> torch.Tensor:
        """keys, values [num_blocks, block_size, num_kv_heads, head_dim]: one layer's views of the pool;
        query [num_prompt_tokens, num_heads, head_dim] of ``batch.prompts`` alone; result like query."""

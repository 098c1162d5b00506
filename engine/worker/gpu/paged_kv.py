"""The interface between a decoder that writes K and V itself and the attention over their pages."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.worker.attention.backend import AttentionBackend


class PagedKv(AttentionBackend, Protocol):
    """An AttentionBackend that exposes the slots for K and V of the step, so that the model can fill them."""

    kv_scale: float
    """Scale of the values in an 8-bit pool."""

    def slots_of(self, layer: int) -> torch.Tensor:
        """The slots for K and V of the step in a layer's pages; see StepBatch.slots."""

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer: views of the pool [num_blocks, block_size, num_kv_heads, head_dim]"""

    def attend_written(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        chunk: int | None = None,
        soft_cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of query [num_tokens, num_heads, head_dim] over each sequence's KV, including this
        step's, which is already written; result like query."""

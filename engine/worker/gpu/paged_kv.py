"""The seam between a decoder that writes K and V by itself and the attention over their pages."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.worker.attention.backend import AttentionBackend


class PagedKv(AttentionBackend, Protocol):
    """An AttentionBackend that says where the K and V of the step go, and that takes them as written."""

    kv_scale: float
    """What numbers of 8 bits in the pool are multiplied with."""

    @property
    def slots(self) -> torch.Tensor:
        """See StepBatch.slots."""

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, views of the pool [num_blocks, block_size, num_kv_heads, head_dim]"""

    def attend_written(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None = None,
    ) -> torch.Tensor:
        """The causal attention of the query [num_tokens, num_heads, head_dim] over each sequence's KV, that
        of this step included; result like query."""

"""Prefill paths over contiguous K and V: they gather the pages first, so any page size and layout works.

The cost of a gather is small compared with the attention of a long prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from engine.worker.gpu.ops import uses_triton
from engine.worker.gpu.prompt_paths.path import AttentionKind, Prompts


class DenseKernel(Protocol):
    """Causal attention of several sequences of different lengths over contiguous K and V (varlen)."""

    @property
    def name(self) -> str:
        """The kernel's name in logs."""

    def can(self, kind: AttentionKind) -> bool:
        """Whether the kernel supports this kind of attention."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        prompts: Prompts,
        kind: AttentionKind,
    ) -> torch.Tensor:
        """query [num_tokens, num_heads, head_dim]; key, value [kv_starts[-1], num_kv_heads, head_dim]; the
        last query of a sequence attends to its last key. Result like query."""


PageGather = Callable[
    [torch.Tensor, torch.Tensor, Prompts, torch.Tensor, torch.Tensor, float, int | None], None
]
"""See ``gather_pages``."""


class GatherScratch:
    """Scratch memory for the gathered pages of one layer; reused by the next layer."""

    def __init__(
        self, pool: torch.Tensor, dtype: torch.dtype, max_tokens: int, kv_scale: float = 1.0
    ) -> None:
        """``pool`` [num_blocks, num_slots, 2, block_size, num_kv_heads, head_dim]; gathered values are of
        ``dtype``. ``kv_scale`` is the scale of an 8-bit pool."""
        self._dense = torch.empty((2, max_tokens, *pool.shape[4:]), dtype=dtype, device=pool.device)
        self._kv_scale = kv_scale
        self._gather = _select_gather(pool.device)

    @property
    def max_tokens(self) -> int:
        return self._dense.shape[1]

    def gather(
        self, keys: torch.Tensor, values: torch.Tensor, prompts: Prompts, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The K and V of the prompts, concatenated: both [kv_starts[-1], num_kv_heads, head_dim]. Tokens
        before the window of a prompt's first query token are zeros, as their pages may be another
        sequence's."""
        total = sum(chunk.seq_len for chunk in prompts.chunks)
        key = self._dense[0, :total]
        value = self._dense[1, :total]
        self._gather(keys, values, prompts, key, value, self._kv_scale, window)
        return key, value


def gather_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    prompts: Prompts,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_scale: float,
    window: int | None,
) -> None:
    """Fill ``key`` and ``value``; see GatherScratch.gather. In plain torch, the reference for the kernel."""
    block_size = keys.shape[1]
    start = 0
    for chunk, table in zip(prompts.chunks, prompts.block_tables, strict=True):
        tokens = torch.arange(chunk.seq_len, device=keys.device)
        places = table[tokens // block_size].long(), tokens % block_size
        for pages, dense in ((keys, key), (values, value)):
            found = pages[places]
            if found.dtype != dense.dtype:
                found = found.float() * kv_scale
            dense[start : start + chunk.seq_len] = found
            if window is not None:
                dense[start : start + max(0, chunk.seq_len - chunk.query_len - window + 1)] = 0
        start += chunk.seq_len


def _select_gather(device: torch.device) -> PageGather:
    if not uses_triton(device):
        return gather_pages
    from engine.worker.gpu.triton_gather import gather_pages_fused

    return gather_pages_fused


class GatheredPrompts:
    """A PromptPath that gathers pages for a DenseKernel."""

    def __init__(self, kernel: DenseKernel, scratch: GatherScratch) -> None:
        self._kernel = kernel
        self._scratch = scratch

    @property
    def name(self) -> str:
        return self._kernel.name

    def can(self, kind: AttentionKind) -> bool:
        return self._kernel.can(kind)

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        prompts: Prompts,
        kind: AttentionKind,
    ) -> torch.Tensor:
        key, value = self._scratch.gather(keys, values, prompts, kind.window)
        return self._kernel.attend(query, key, value, prompts, kind)

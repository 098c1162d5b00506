"""PyTorch's varlen attention, in the releases that support pages."""

from __future__ import annotations

import torch
from torch.nn.attention import varlen

from engine.worker.gpu.prompt_paths.path import AttentionKind, Prompts


class TorchVarlen:
    """A PromptPath; the pool must have the dtype of the queries."""

    name = "torch.nn.attention.varlen"

    def can(self, kind: AttentionKind) -> bool:
        return kind.soft_cap is None

    def attend(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        prompts: Prompts,
        kind: AttentionKind,
    ) -> torch.Tensor:
        seq_lens = prompts.seq_lens
        block_tables = prompts.block_tables
        max_seq_len = prompts.max_seq_len
        if kind.window is not None:
            seq_lens, block_tables, max_seq_len = _seen_pages(prompts, kind.window, keys.shape[1])
        output = varlen.varlen_attn(
            query=query,
            key=keys,
            value=values,
            cu_seq_q=prompts.query_starts,
            cu_seq_k=None,
            max_q=prompts.max_query_len,
            max_k=max_seq_len,
            scale=kind.scale,
            window_size=(-1 if kind.window is None else kind.window - 1, 0),
            enable_gqa=True,
            seqused_k=seq_lens,
            block_table=block_tables,
        )
        assert isinstance(output, torch.Tensor), "only the output was requested"
        return output


def _seen_pages(prompts: Prompts, window: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Lengths and block tables from the first page that each prompt sees, and the largest length.

    The pages before it may be another sequence's, and the kernel would read a tile of them.
    """
    block_tables = prompts.block_tables
    contexts = prompts.seq_lens - prompts.query_starts.diff()
    first_pages = (contexts - window + 1).clamp_(min=0) // block_size
    pages = first_pages[:, None] + torch.arange(block_tables.shape[1], device=block_tables.device)
    seen = block_tables.gather(1, pages.clamp_(max=block_tables.shape[1] - 1))
    firsts = (max(0, chunk.seq_len - chunk.query_len - window + 1) for chunk in prompts.chunks)
    longest = max(
        chunk.seq_len - first // block_size * block_size
        for chunk, first in zip(prompts.chunks, firsts, strict=True)
    )
    return prompts.seq_lens - first_pages * block_size, seen, longest

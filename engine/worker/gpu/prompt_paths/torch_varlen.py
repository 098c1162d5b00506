"""PyTorch's varlen attention, in the releases that read pages."""

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
        output = varlen.varlen_attn(
            query=query,
            key=keys,
            value=values,
            cu_seq_q=prompts.query_starts,
            cu_seq_k=None,
            max_q=prompts.max_query_len,
            max_k=prompts.max_seq_len,
            scale=kind.scale,
            window_size=(-1 if kind.window is None else kind.window - 1, 0),
            enable_gqa=True,
            seqused_k=prompts.seq_lens,
            block_table=prompts.block_tables,
        )
        assert isinstance(output, torch.Tensor), "only the output was requested"
        return output

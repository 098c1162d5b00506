"""Row-parallel linears, embeddings and LM heads: a rank's part, and the collective that combines the ranks'
outputs.

A column-parallel layer needs no class, as it is a smaller linear.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.worker.models.linears import AnyEmbedding, Embedding
from engine.worker.parallel.group import TensorParallelGroup


class RowParallelLinear(nn.Module):
    """An ``nn.Linear`` split by inputs: it sums the ranks' outputs, then adds the bias once."""

    def __init__(self, partial: nn.Linear, bias: nn.Parameter | None, group: TensorParallelGroup) -> None:
        super().__init__()
        self.partial = partial
        self.bias = bias
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        """[out_features, in_features / size]"""
        return self.partial.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in_features / size] -> [n, out_features]"""
        output = self._group.all_reduce(self.partial(x))
        return output if self.bias is None else output.add_(self.bias)


class VocabParallelEmbedding(nn.Module):
    """An AnyEmbedding of which each rank holds a range of vectors."""

    def __init__(self, table: Embedding, group: TensorParallelGroup) -> None:
        super().__init__()
        self.table: AnyEmbedding = table
        self._group = group
        self._num_vectors = len(table.weight)

    @property
    def weight(self) -> torch.Tensor:
        """[num_vectors / size, width], until the embedding is packed"""
        assert isinstance(self.table, Embedding)
        return self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Like ``Embedding.forward``; a rank without the vector adds zeros."""
        own = ids - self._group.rank * self._num_vectors
        absent = (own < 0) | (own >= self._num_vectors)
        vectors = self.table(own.masked_fill(absent, 0)).contiguous()
        return self._group.all_reduce(vectors.masked_fill_(absent[:, None], 0))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Like ``Embedding.logits`` at the first rank; [n, 0] at the others."""
        return self._group.gather(self.table.logits(x))


class ParallelLMHead(nn.Module):
    """An ``nn.Linear`` without bias, split by outputs, which are gathered at the first rank."""

    def __init__(self, partial: nn.Linear, group: TensorParallelGroup) -> None:
        super().__init__()
        self.partial = partial
        self._group = group

    @property
    def weight(self) -> torch.Tensor:
        """[out_features / size, in_features]"""
        return self.partial.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in_features] -> [n, out_features] at the first rank, [n, 0] at the others"""
        return self._group.gather(self.partial(x))

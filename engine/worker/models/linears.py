"""Embeddings, and the replacement of modules by faster ones. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.nn.functional import embedding, linear

Kind = TypeVar("Kind", bound=nn.Module)


class AnyEmbedding(Protocol):
    """An embedding that may also be the model's LM head: its vectors are looked up, and multiplied with."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> their vectors [n, width]"""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, width] -> its logits [n, num_vectors]: the product with every vector"""


class Embedding(nn.Module):
    """An AnyEmbedding as it is loaded."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> their vectors [n, width]"""
        return embedding(ids, self.weight)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, width] -> its logits [n, num_vectors]: the product with every vector"""
        return linear(x, self.weight)


def replace_modules(root: nn.Module, kind: type[Kind], replacement: Callable[[Kind], nn.Module]) -> None:
    """Replace each module of a kind below ``root`` one by one: at most one weight is in memory twice."""
    for parent in root.modules():
        names = [name for name, child in parent.named_children() if isinstance(child, kind)]
        for name in names:
            plain = parent.get_submodule(name)
            assert isinstance(plain, kind)
            setattr(parent, name, replacement(plain))

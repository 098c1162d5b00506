"""What a decoder multiplies with, and how that is replaced by what is faster. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import nn
from torch.nn.functional import embedding, linear

Kind = TypeVar("Kind", bound=nn.Module)


class VectorTable(Protocol):
    """Vectors that are looked up by number and multiplied with: an embedding, also as a model's head."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> their vectors [n, width]"""

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, width] -> the product of each with every vector [n, num_vectors]"""


class Table(nn.Module):
    """A VectorTable as it is loaded."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> their vectors [n, width]"""
        return embedding(ids, self.weight)

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, width] -> the product of each with every vector [n, num_vectors]"""
        return linear(x, self.weight)


def replace_modules(root: nn.Module, kind: type[Kind], replacement: Callable[[Kind], nn.Module]) -> None:
    """Replace each module of a kind below ``root``, one by one: no more than one weight is held twice."""
    for parent in root.modules():
        names = [name for name, child in parent.named_children() if isinstance(child, kind)]
        for name in names:
            plain = parent.get_submodule(name)
            assert isinstance(plain, kind)
            setattr(parent, name, replacement(plain))

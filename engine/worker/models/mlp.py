"""A decoder's MLPs: with a gate, with a square, or with xIELU."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import gelu, relu, silu, softplus

from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.shape import DenseShape

_XIELU_BETA = 0.5
_XIELU_EPS = -1e-6
"""Constants of xIELU, which checkpoints may hold, too."""


class SquaredMLP(nn.Module):
    """``down(relu(up) ** 2)``, or a rank's part of it."""

    def __init__(self, hidden_size: int, shape: DenseShape, build: Builder, *, partial: bool = False) -> None:
        """``partial``: the caller adds up the outputs of ranks."""
        super().__init__()
        self._group = build.group
        inner = shape.intermediate_size
        self.up = build.linear(hidden_size, inner, shape.bias)
        self.down = (build.linear if partial else build.row_parallel)(inner, hidden_size, shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        output: torch.Tensor = self.down(relu(self.up(x)).square())
        return output

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        rank = self._group.rank
        size = self._group.size
        ups = self.up.named_parameters()
        parts = {f"up_proj.{kind}": TensorPart(up, 0, rank, size) for kind, up in ups}
        parts["down_proj.weight"] = TensorPart(self.down.weight, 1, rank, size)
        if self.down.bias is not None:
            parts["down_proj.bias"] = TensorPart(self.down.bias)
        return parts


class XieluMLP(SquaredMLP):
    """``down(xielu(up))`` (arXiv:2411.13010), or a rank's part of it."""

    def __init__(self, hidden_size: int, shape: DenseShape, build: Builder) -> None:
        super().__init__(hidden_size, shape, build)
        self.above = build.parameter(1)
        self.below = build.parameter(1)
        """Slopes above and below zero, before softplus."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        output: torch.Tensor = self.down(self._xielu(self.up(x)))
        return output

    def _xielu(self, x: torch.Tensor) -> torch.Tensor:
        above = softplus(self.above) * x * x + _XIELU_BETA * x
        below = (torch.expm1(x.clamp(max=_XIELU_EPS)) - x) * (_XIELU_BETA + softplus(self.below))
        return torch.where(x > 0, above, below + _XIELU_BETA * x)

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        slopes = {"act_fn.alpha_p": TensorPart(self.above), "act_fn.alpha_n": TensorPart(self.below)}
        return super().checkpoint_parts() | slopes


class GatedMLP(nn.Module):
    """``down(silu(gate) * up)``, or with GELU, or a rank's part of it."""

    def __init__(self, hidden_size: int, shape: DenseShape, build: Builder, *, partial: bool = False) -> None:
        """``partial``: the caller adds up the outputs of ranks."""
        super().__init__()
        self._group = build.group
        self._shape = shape
        self.is_joined = shape.joined
        """Whether gates and ups are one linear in checkpoints."""
        self.intermediate_size = inner = shape.intermediate_size
        self.gate_up = build.linear(hidden_size, 2 * inner, shape.bias)
        self.down = (build.linear if partial else build.row_parallel)(inner, hidden_size, shape.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        shape = self._shape
        if shape.gate_scale != 1.0:
            gate = gate * shape.gate_scale
        opened = gelu(gate, approximate="tanh") if shape.by_gelu else silu(gate)
        output: torch.Tensor = self.down(opened.mul_(up))
        return output if shape.output_scale == 1.0 else output * shape.output_scale

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """The checkpoint's tensor names, each with its part and the parameter that it fills."""
        rank = self._group.rank
        size = self._group.size
        parts = {}
        for kind, gate_up in self.gate_up.named_parameters():
            if self.is_joined:
                num_pieces = 1 if size == 1 else 2
                parts[f"gate_up_proj.{kind}"] = TensorPart(gate_up, 0, rank, size, num_pieces)
                continue
            gate, up = gate_up.chunk(2)
            parts[f"gate_proj.{kind}"] = TensorPart(gate, 0, rank, size)
            parts[f"up_proj.{kind}"] = TensorPart(up, 0, rank, size)
        parts["down_proj.weight"] = TensorPart(self.down.weight, 1, rank, size)
        if self.down.bias is not None:
            parts["down_proj.bias"] = TensorPart(self.down.bias)
        return parts

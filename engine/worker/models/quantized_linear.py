"""Matrix products on a CPU whose weight was rounded to 8 or 4 bits as it was loaded, which takes less memory.

Inputs and outputs keep their type; what is lost is what rounding the weight loses. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from engine.worker.models.linears import Table

GROUP_SIZE = 32
"""Inputs that share a scale and a zero in 4 bits, which so take 5; torch has 32, 64, 128 and 256."""
_ROWS = 1024
"""Rounded together: there may be no room for a copy of all in 32 bits."""
_LANES = 16
"""Outputs that torch's product of 4 bits takes at once."""


class Int8Linear(nn.Module):
    """``w ≈ scale · q`` with q in [-127, 127] and a scale for each output."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight, self._scales = _to_int8(weight)
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        return _with_bias(torch._weight_int8pack_mm(x, self._weight, self._scales), self._bias)


class Int4Linear(nn.Module):
    """``w ≈ scale · (q - 8) + zero``, q in [0, 15]; scale and zero are of an output and a group of inputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        numbers, grid = _to_int4(weight)
        self._weight = torch._convert_weight_to_int4pack_for_cpu(numbers, 1)
        self._grid = grid.transpose(0, 1).contiguous()
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        product = torch._weight_int4pack_mm_for_cpu(x, self._weight, GROUP_SIZE, self._grid)
        return _with_bias(product, self._bias)


class Int8Table(nn.Module):
    """A VectorTable of vectors in 8 bits, each with its scale."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._weight, self._scales = _to_int8(table.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """As Table's."""
        return self._weight[ids].to(self._scales.dtype) * self._scales[ids, None]

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """As Table's."""
        return torch._weight_int8pack_mm(x, self._weight, self._scales)


def int8_linear(plain: nn.Linear) -> Int8Linear:
    return Int8Linear(plain.weight, plain.bias)


def int4_linear(plain: nn.Linear) -> Int4Linear | Int8Linear:
    """In 8 bits where its sizes are not those that torch multiplies in 4."""
    if plain.in_features % GROUP_SIZE or plain.out_features % _LANES:
        return int8_linear(plain)
    return Int4Linear(plain.weight, plain.bias)


def _to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [out, in] and scales [out], these in the type of the weight."""
    numbers, scales = weight.new_empty(weight.shape, dtype=torch.int8), weight.new_empty(len(weight))
    for rows, rounded, scale in _by_rows(weight, numbers, scales):
        scale.copy_((rows.abs().amax(dim=1).float() / 127).clamp_min(torch.finfo(weight.dtype).tiny))
        rounded.copy_((rows.float() / scale.float()[:, None]).round_().clamp_(-127, 127))
    return numbers, scales


def _to_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers [out, in] and, in the type of the weight, scales and zeros [out, groups, 2]."""
    numbers = weight.new_empty(weight.shape, dtype=torch.int32)
    grid = weight.new_empty(len(weight), weight.shape[1] // GROUP_SIZE, 2)
    for rows, rounded, parts in _by_rows(weight, numbers, grid):
        groups = rows.float().view(len(rows), -1, GROUP_SIZE)
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / 15).clamp_min(torch.finfo(weight.dtype).tiny)
        parts.copy_(torch.stack([scales, low + 8 * scales], dim=-1))
        scales, zeros = parts.float().unbind(-1)  # as they are kept: the rounding is to these
        units = (groups - zeros[..., None]).div_(scales[..., None]).round_()
        rounded.copy_(units.add_(8).clamp_(0, 15).flatten(1))
    return numbers, grid


def _by_rows(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of all, part by part."""
    return zip(*(torch.split(tensor, _ROWS) for tensor in tensors), strict=True)


def _with_bias(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product.add_(bias)

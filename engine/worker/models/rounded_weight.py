"""Weights of 8 and 4 bits as the compiled code multiplies with them: it makes pairs of bf16 of what it reads,
so that a small step waits for half or a third of the memory. Knows nothing of models.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import pad

from engine.worker.kernels.weights import INTERLEAVED, CompiledProduct, WeightAddress
from engine.worker.models.rounding import GROUP_SIZE, by_rows, to_int4, to_int8

_NUMBERS = 8
"""Of 4 bits, in a word."""


class RoundedWeight(Protocol):
    """A weight [outputs, inputs] as the compiled code reads it."""

    def address(self, bias: torch.Tensor | None) -> WeightAddress:
        """Valid as long as this and ``bias`` are held."""


class Weight8:
    """A RoundedWeight: ``w ≈ scale · q``, q in [-127, 127], a scale for each output."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [outputs, inputs], inputs a multiple of GROUP_SIZE"""
        self.num_outputs, self._num_inputs = weight.shape
        blocks = -(-self.num_outputs // INTERLEAVED)
        self._numbers = weight.new_empty((blocks, self._num_inputs // 2, INTERLEAVED, 2), dtype=torch.int8)
        self._scales = weight.new_empty(blocks, INTERLEAVED)
        for rows, numbers, scales in by_rows(weight, self._numbers, self._scales, block=INTERLEAVED):
            rounded, scale = to_int8(_whole_blocks(rows))
            numbers.copy_(rounded.view(-1, INTERLEAVED, self._num_inputs // 2, 2).transpose(1, 2))
            scales.copy_(scale.view_as(scales))

    def address(self, bias: torch.Tensor | None) -> WeightAddress:
        """See RoundedWeight."""
        return _address(self._numbers, self._scales, bias, self.num_outputs, self._num_inputs, bits=8)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> those rows [n, inputs]"""
        numbers = self._numbers[ids // INTERLEAVED, :, ids % INTERLEAVED].flatten(1)
        return numbers.to(self._scales.dtype) * self._scales.view(-1)[ids, None]


class Weight4:
    """A RoundedWeight: ``w ≈ scale · (q - 8) + zero``, q in [0, 15]; scale and zero are of an output and a
    group of inputs."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [outputs, inputs], inputs a multiple of GROUP_SIZE"""
        self._num_outputs, self._num_inputs = weight.shape
        blocks, groups = -(-self._num_outputs // INTERLEAVED), self._num_inputs // GROUP_SIZE
        self._numbers = weight.new_empty((blocks, groups, 2, INTERLEAVED, 2), dtype=torch.int32)
        self._grid = weight.new_empty(blocks, groups, INTERLEAVED, 2)
        for rows, numbers, grid in by_rows(weight, self._numbers, self._grid, block=INTERLEAVED):
            rounded, parts = to_int4(_whole_blocks(rows))
            numbers.copy_(_words(rounded.view(-1, INTERLEAVED, groups, 2, _NUMBERS, 2)))
            grid.copy_(parts.view(-1, INTERLEAVED, groups, 2).transpose(1, 2))

    def address(self, bias: torch.Tensor | None) -> WeightAddress:
        """See RoundedWeight."""
        return _address(self._numbers, self._grid, bias, self._num_outputs, self._num_inputs, bits=4)


class RoundedLinear(nn.Module):
    """Stands in for an ``nn.Linear`` of bf16."""

    def __init__(self, weight: RoundedWeight, bias: torch.Tensor | None, product: CompiledProduct) -> None:
        super().__init__()
        self._weight, self._product = weight, product
        self._bias = None if bias is None else pad(bias, (0, -len(bias) % INTERLEAVED))

    def address(self) -> WeightAddress:
        """Valid as long as this is held."""
        return self._weight.address(self._bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        return self._product(x, self.address())


class RoundedTable(nn.Module):
    """A VectorTable of bf16 vectors in 8 bits, each with its scale."""

    def __init__(self, weight: torch.Tensor, product: CompiledProduct) -> None:
        super().__init__()
        self._weight, self._product = Weight8(weight), product

    def address(self) -> WeightAddress:
        """Valid as long as this is held."""
        return self._weight.address(None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """As Table's."""
        return self._weight.rows(ids)

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """As Table's."""
        return self._product(x, self.address())


def _whole_blocks(rows: torch.Tensor) -> torch.Tensor:
    """``rows``, with zeros behind the last."""
    return pad(rows, (0, 0, 0, -len(rows) % INTERLEAVED))


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """numbers [blocks, outputs, groups, 2, 8, 2] of 4 bits -> words [blocks, groups, 2, outputs, 2]: each of
    the even or the odd ones of 16 inputs, the first in the lowest bits"""
    shifts = 4 * torch.arange(_NUMBERS, dtype=torch.int32)
    words = (numbers << shifts[:, None]).sum(4, dtype=torch.int32)
    return words.permute(0, 2, 3, 1, 4)


def _address(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    num_outputs: int,
    num_inputs: int,
    *,
    bits: int,
) -> WeightAddress:
    return WeightAddress(
        numbers.data_ptr(),
        scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        num_outputs,
        num_inputs // 2,
        INTERLEAVED,
        bits,
    )

"""Packed weights for the compiled GEMM: bf16, or quantized to 8 or 4 bits. The GEMM expands quantized ones to
pairs of bf16 as it reads them, so that a small step reads half or a third of the memory.

Knows nothing of models.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import nn
from torch.nn.functional import pad

from engine.worker.cpu.kernels.library import KernelUnavailable
from engine.worker.cpu.kernels.weights import INTERLEAVED, CompiledGemm, WeightAddress
from engine.worker.cpu.quantization import (
    GROUP_SIZE,
    AnyWeight,
    Quantized,
    as_int4,
    as_int8,
    by_rows,
    whole_blocks,
)
from engine.worker.memory import empty_pages
from engine.worker.models.linears import Embedding

logger = logging.getLogger(__name__)

INPUTS_AT_ONCE = 32
"""Inputs that the compiled GEMM multiplies together. It supports only multiples of it, as GROUP_SIZE is."""


class PackedWeight(Protocol):
    """A weight [outputs, inputs] in the layout of the compiled GEMM."""

    numbers: torch.Tensor
    """The packed numbers, which take nearly all of the weight's memory."""

    def address(self, bias: torch.Tensor | None) -> WeightAddress:
        """The addresses for the kernels, valid as long as this object and ``bias`` are referenced."""


class Weight16:
    """A PackedWeight in bf16."""

    def __init__(self, weight: torch.Tensor, gemm: CompiledGemm) -> None:
        """weight [outputs, inputs], inputs a multiple of INPUTS_AT_ONCE"""
        self._num_outputs, self._num_inputs = weight.shape
        self.numbers = gemm.interleave(weight)

    def address(self, bias: torch.Tensor | None) -> WeightAddress:
        """See PackedWeight."""
        return _address(self.numbers, None, bias, self._num_outputs, self._num_inputs, bits=16)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> the rows of the weight [n, inputs]"""
        return self.numbers[ids // INTERLEAVED, :, ids % INTERLEAVED].flatten(1)


class Weight8:
    """A PackedWeight in int8: ``w ≈ scale · q``, q in [-127, 127], with a scale per output."""

    def __init__(self, weight: AnyWeight) -> None:
        """weight [outputs, inputs], inputs a multiple of GROUP_SIZE"""
        self._num_outputs, self._num_inputs = weight.shape
        blocks = -(-self._num_outputs // INTERLEAVED)
        self.numbers = empty_pages((blocks, self._num_inputs // 2, INTERLEAVED, 2), torch.int8)
        self._scales = torch.empty(blocks, INTERLEAVED, dtype=weight.dtype)
        for rows, (numbers, scales) in by_rows(weight, self.numbers, self._scales, block=INTERLEAVED):
            quantized, scale = as_int8(whole_blocks(rows, INTERLEAVED))
            numbers.copy_(quantized.view(-1, INTERLEAVED, self._num_inputs // 2, 2).transpose(1, 2))
            scales.copy_(scale.view_as(scales))

    def address(self, bias: torch.Tensor | None) -> WeightAddress:
        """See PackedWeight."""
        return _address(self.numbers, self._scales, bias, self._num_outputs, self._num_inputs, bits=8)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [n] -> the rows of the weight [n, inputs]"""
        numbers = self.numbers[ids // INTERLEAVED, :, ids % INTERLEAVED].flatten(1)
        return numbers.to(self._scales.dtype) * self._scales.view(-1)[ids, None]


class Weight4:
    """A PackedWeight in int4: ``w ≈ scale · (q - 8) + zero``, q in [0, 15], with a scale and a zero per
    output and group of inputs; or in e2m1, see ``Quantized``."""

    def __init__(self, weight: AnyWeight) -> None:
        """weight [outputs, inputs], inputs a multiple of GROUP_SIZE"""
        self._num_outputs, self._num_inputs = weight.shape
        self._is_float = isinstance(weight, Quantized) and weight.is_float
        blocks = -(-self._num_outputs // INTERLEAVED)
        groups = self._num_inputs // GROUP_SIZE
        self.numbers = empty_pages((blocks, groups, 2, INTERLEAVED, 2), torch.int32)
        self._grid = torch.empty(blocks, groups, INTERLEAVED, 2, dtype=weight.dtype)
        for rows, (numbers, grid) in by_rows(weight, self.numbers, self._grid, block=INTERLEAVED):
            quantized, parts = as_int4(whole_blocks(rows, INTERLEAVED))
            numbers.copy_(_words(quantized.view(-1, INTERLEAVED, groups, 2, 16)))
            grid.copy_(parts.view(-1, INTERLEAVED, groups, 2).transpose(1, 2))

    def address(self, bias: torch.Tensor | None) -> WeightAddress:
        """See PackedWeight."""
        address = _address(self.numbers, self._grid, bias, self._num_outputs, self._num_inputs, bits=4)
        address.is_float = self._is_float
        return address


class PackedWeightLinear(nn.Module):
    """Replaces a bf16 ``nn.Linear``."""

    numbers: torch.Tensor

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, gemm: CompiledGemm) -> None:
        super().__init__()
        self._weight = weight
        self._gemm = gemm
        self._bias = None if bias is None else pad(bias, (0, -len(bias) % INTERLEAVED))
        self.register_buffer("numbers", weight.numbers, persistent=False)

    def address(self) -> WeightAddress:
        """The addresses for the kernels, valid as long as this object is referenced."""
        return self._weight.address(self._bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        return self._gemm(x, self.address())


class PackedEmbedding(nn.Module):
    """An AnyEmbedding over a packed weight."""

    numbers: torch.Tensor

    def __init__(self, weight: Weight16 | Weight8, gemm: CompiledGemm) -> None:
        super().__init__()
        self._weight = weight
        self._gemm = gemm
        self.register_buffer("numbers", weight.numbers, persistent=False)

    def address(self) -> WeightAddress:
        """The addresses for the kernels, valid as long as this object is referenced."""
        return self._weight.address(None)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``AnyEmbedding``."""
        return self._weight.rows(ids)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``AnyEmbedding``."""
        return self._gemm(x, self.address())


def compiled_gemm(head_dim: int, device: torch.device, dtype: torch.dtype) -> CompiledGemm | None:
    """The compiled GEMM for the linears of a decoder; None if torch must multiply."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        return None
    try:
        return CompiledGemm.load(head_dim)
    except KernelUnavailable as error:
        logger.info("Compiled GEMM unavailable (%s): using torch.", error)
        return None


def interleaved_linear(plain: nn.Linear, gemm: CompiledGemm) -> nn.Linear | PackedWeightLinear:
    """Return a packed replacement for ``plain``, or ``plain`` itself if its number of inputs is not
    supported."""
    if plain.in_features % INPUTS_AT_ONCE:
        return plain
    return PackedWeightLinear(Weight16(plain.weight, gemm), plain.bias, gemm)


def interleaved_embedding(table: Embedding, gemm: CompiledGemm) -> Embedding | PackedEmbedding:
    """Like ``interleaved_linear``, for an embedding."""
    if table.weight.shape[1] % INPUTS_AT_ONCE:
        return table
    return PackedEmbedding(Weight16(table.weight, gemm), gemm)


def _words(numbers: torch.Tensor) -> torch.Tensor:
    """numbers [blocks, outputs, groups, 2, 16] of 4 bits -> 32-bit lanes [blocks, groups, 2, outputs, 2],
    each with the even or the odd inputs of 16, the first in the lowest bits"""
    eights = numbers.to(torch.uint8).contiguous().view(torch.int64)  # bytes, the first in the lowest bits
    both = torch.stack((_every_other(eights), _every_other(eights >> 8)), dim=-1)
    words = (both[..., 0, :] | both[..., 1, :] << 16).to(torch.int32)
    return words.permute(0, 2, 3, 1, 4)


def _every_other(eights: torch.Tensor) -> torch.Tensor:
    """The 4-bit numbers in bytes 0, 2, 4 and 6 of each int64, as 16 bits."""
    spread = eights & 0x000F000F000F000F
    return (spread | spread >> 12 | spread >> 24 | spread >> 36) & 0xFFFF


def _address(
    numbers: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    num_outputs: int,
    num_inputs: int,
    *,
    bits: int,
) -> WeightAddress:
    return WeightAddress(
        numbers.data_ptr(),
        None if scales is None else scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        num_outputs,
        num_inputs // 2,
        bits,
    )

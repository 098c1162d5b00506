"""Linears with weights in 8 or 4 bits, on a CPU, to save memory: quantized at load time, or already in the
checkpoint.

Inputs and outputs keep their dtype; the only loss is the quantization of the weight. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_weights import PackedEmbedding, PackedWeightLinear, Weight4, Weight8
from engine.worker.cpu.quantization import (
    GROUP_SIZE,
    AnyWeight,
    Quantized,
    as_int4,
    as_int8,
    by_rows,
)
from engine.worker.models.linears import Embedding

Quantizer = Callable[[AnyWeight], tuple[torch.Tensor, torch.Tensor]]

_LANES = 16
"""The int4 GEMM of torch needs a multiple of this many outputs."""
INT8_UNIT = 16
"""The int8 GEMM of torch needs a multiple of this many inputs; with others it ends the process."""


class Int8Linear(nn.Module):
    """An int8 linear: ``w ≈ scale · q`` with q in [-127, 127] and a scale per output."""

    def __init__(self, weight: AnyWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._weight, self._scales = _to_int8(weight)
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        return _with_bias(torch._weight_int8pack_mm(x, self._weight, self._scales), self._bias)


class Int4Linear(nn.Module):
    """An int4 linear: ``w ≈ scale · (q - 8) + zero`` with q in [0, 15], a scale and a zero per output and
    group of inputs."""

    def __init__(self, weight: AnyWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        numbers, grid = _to_int4(weight)
        self._weight = torch._convert_weight_to_int4pack_for_cpu(numbers, 1)
        self._grid = grid.transpose(0, 1).contiguous()
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_rows, in_features] -> [num_rows, out_features]"""
        output = torch._weight_int4pack_mm_for_cpu(x, self._weight, GROUP_SIZE, self._grid)
        return _with_bias(output, self._bias)


class Int8Embedding(nn.Module):
    """An AnyEmbedding of int8 vectors, each with a separate scale."""

    def __init__(self, table: Embedding) -> None:
        super().__init__()
        self._weight, self._scales = _to_int8(table.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``AnyEmbedding``."""
        return self._weight[ids].to(self._scales.dtype) * self._scales[ids, None]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``AnyEmbedding``."""
        return torch._weight_int8pack_mm(x, self._weight, self._scales)


def int8_linear(
    plain: nn.Linear, gemm: CompiledGemm | None = None
) -> nn.Linear | Int8Linear | PackedWeightLinear:
    """Quantize a linear to int8, unless its sizes do not allow that."""
    if plain.in_features % INT8_UNIT:
        return plain
    if gemm is None or plain.in_features % GROUP_SIZE:
        return Int8Linear(plain.weight, plain.bias)
    return PackedWeightLinear(Weight8(plain.weight), plain.bias, gemm)


def int4_linear(
    plain: nn.Linear, gemm: CompiledGemm | None = None
) -> nn.Linear | Int4Linear | Int8Linear | PackedWeightLinear:
    """Quantize a linear to int4, or to int8 if its sizes do not allow int4."""
    if plain.in_features % GROUP_SIZE:
        return int8_linear(plain, gemm)
    if gemm is not None:
        return PackedWeightLinear(Weight4(plain.weight), plain.bias, gemm)
    if plain.out_features % _LANES:
        return int8_linear(plain)
    return Int4Linear(plain.weight, plain.bias)


def int8_embedding(
    table: Embedding, gemm: CompiledGemm | None = None
) -> Embedding | Int8Embedding | PackedEmbedding:
    """Quantize a table of vectors to int8, unless their size does not allow that."""
    if table.weight.shape[1] % INT8_UNIT:
        return table
    if gemm is None or table.weight.shape[1] % GROUP_SIZE:
        return Int8Embedding(table)
    return PackedEmbedding(Weight8(table.weight), gemm)


def kept_linear(
    weight: Quantized, bits: int, bias: torch.Tensor | None, gemm: CompiledGemm | None = None
) -> Int4Linear | Int8Linear | PackedWeightLinear:
    """A linear over a weight that is already quantized, for sizes that ``can_keep`` accepts."""
    if gemm is not None and weight.shape[1] % GROUP_SIZE == 0:
        return PackedWeightLinear(Weight4(weight) if bits == 4 else Weight8(weight), bias, gemm)
    return Int4Linear(weight, bias) if bits == 4 else Int8Linear(weight, bias)


def can_keep(num_outputs: int, num_inputs: int, bits: int, gemm: CompiledGemm | None) -> bool:
    """Whether a linear of these sizes supports a weight with ``bits`` bits."""
    if bits == 8:
        return num_inputs % INT8_UNIT == 0
    return num_inputs % GROUP_SIZE == 0 and (gemm is not None or num_outputs % _LANES == 0)


def _to_int8(weight: AnyWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``quantization.to_int8``."""
    scales = torch.empty(weight.shape[0], dtype=weight.dtype)
    kept = torch.empty(weight.shape, dtype=torch.int8), scales
    _fill(weight, as_int8, kept)
    return kept


def _to_int4(weight: AnyWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``quantization.to_int4``."""
    grid = torch.empty(weight.shape[0], weight.shape[1] // GROUP_SIZE, 2, dtype=weight.dtype)
    kept = torch.empty(weight.shape, dtype=torch.int32), grid
    _fill(weight, as_int4, kept)
    return kept


def _fill(weight: AnyWeight, quantize: Quantizer, kept: tuple[torch.Tensor, torch.Tensor]) -> None:
    for rows, parts in by_rows(weight, *kept):
        for part, quantized in zip(parts, quantize(rows), strict=True):
            part.copy_(quantized)


def _with_bias(output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return output if bias is None else output.add_(bias)

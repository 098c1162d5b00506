"""Weights that stay in the bits of their checkpoint, because a kernel of the CPU reads them.

A linear whose weight is stored in 4 bits with zeros, or in 8 with a scale per output, is replaced by one of
the same numbers as soon as all its tensors are read: nothing is dequantized on the way, and the memory of its
parameter is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import nn

from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.quantization import GROUP_SIZE, Quantized
from engine.worker.cpu.quantized_linear import can_keep, kept_linear
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.formats.codes import Codes
from engine.worker.loading.formats.packed_ints import CodedTensor
from engine.worker.loading.formats.stored_tensor import StoredTensor, TensorFiles, region_of
from engine.worker.loading.tensor_part import TensorPart

_INT4_MIDDLE = 8
"""The zero of a weight without one: a kernel's numbers are ``q - 8``."""


@dataclass(slots=True)
class _KeptLinear:
    """A linear that is to be replaced."""

    module: str
    """Its name in the model."""
    bits: int
    rows: dict[str, int]
    """The first output of each tensor that fills it, in order."""
    read: dict[str, Codes] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.read) == len(self.rows)


class KeptWeights:
    """The weights of a model that stay in the checkpoint's bits."""

    def __init__(
        self,
        model: nn.Module,
        parts: Mapping[str, TensorPart],
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        gemm: CompiledGemm | None,
    ) -> None:
        """``model``: on the meta device; ``parts``: those of all its tensors; ``gemm``: what multiplies,
        None: torch."""
        self._model, self._checkpoint, self._dtype, self._gemm = model, checkpoint, dtype, gemm
        self._linears: dict[str, _KeptLinear] = {}
        self.saved_bytes = 0
        """What they take less than in the model's dtype."""
        modules = {
            _memory_of(module.weight): (name, module.weight)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        by_module: dict[str, dict[str, TensorPart]] = {}
        weights: dict[str, torch.Tensor] = {}
        for name, part in parts.items():
            module, weight = modules.get(_memory_of(part.view), ("", part.view))
            if module and part.view.dim() == 2:
                by_module.setdefault(module, {})[name] = part
                weights[module] = weight
        with TensorFiles() as files:
            for module, own in by_module.items():
                self._consider(module, weights[module], own, files)

    @property
    def names(self) -> frozenset[str]:
        """The checkpoint's tensors that stay as they are."""
        return frozenset(self._linears)

    def _consider(
        self, module: str, weight: torch.Tensor, parts: Mapping[str, TensorPart], files: TensorFiles
    ) -> None:
        """Keep the linear's weight if all tensors that fill it allow it, in the same number of bits."""
        kinds = {_kept_bits(self._checkpoint.tensors[name], part, files) for name, part in parts.items()}
        bits = kinds.pop() if len(kinds) == 1 else None
        if bits is None or not can_keep(weight.shape[0], weight.shape[1], bits, self._gemm):
            return
        ordered = sorted(parts, key=lambda name: parts[name].view.storage_offset())
        linear = _KeptLinear(module, bits, {name: len(parts[name].view) for name in ordered})
        self._linears.update(dict.fromkeys(parts, linear))
        self.saved_bytes += weight.numel() * self._dtype.itemsize - _bytes_in_memory(weight.numel(), bits)

    def bytes_in_memory(self, name: str, num_numbers: int) -> int:
        """What so many numbers of a kept tensor take."""
        return _bytes_in_memory(num_numbers, self._linears[name].bits)

    def fill(self, parts: Mapping[str, TensorPart]) -> None:
        """As ``Checkpoint.fill``; then replace the linears of which everything is read."""
        kept = {name: part for name, part in parts.items() if name in self._linears}
        self._checkpoint.fill({name: part for name, part in parts.items() if name not in kept})
        with TensorFiles() as files:
            for name, part in kept.items():
                tensor = self._checkpoint.tensors[name]
                assert _is_coded(tensor)
                linear = self._linears[name]
                linear.read[name] = tensor.codes(files, region_of(tensor.shape, *part.slices))
                if linear.is_complete:
                    self._replace(linear)

    def _replace(self, linear: _KeptLinear) -> None:
        plain = self._model.get_submodule(linear.module)
        assert isinstance(plain, nn.Linear)
        convert = _as_int4 if linear.bits == 4 else _as_int8
        pieces = [convert(linear.read.pop(name), self._dtype) for name in linear.rows]
        weight = Quantized(
            torch.cat([piece.numbers for piece in pieces]), torch.cat([piece.grid for piece in pieces])
        )
        parent, _, own_name = linear.module.rpartition(".")
        replacement = kept_linear(weight, linear.bits, plain.bias, self._gemm)
        setattr(self._model.get_submodule(parent), own_name, replacement)


def _memory_of(tensor: torch.Tensor) -> int:
    """The same for all views of a parameter, on the meta device too."""
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _is_coded(tensor: StoredTensor) -> TypeGuard[CodedTensor]:
    return hasattr(tensor, "codes")


def _kept_bits(tensor: StoredTensor, part: TensorPart, files: TensorFiles) -> int | None:
    """The bits in which a kernel can read this part of the tensor; None if it has to be dequantized."""
    if not _is_coded(tensor) or len(tensor.shape) != 2 or part.num_pieces > 1:
        return None
    inputs = region_of(tensor.shape, *part.slices)[1]
    size = tensor.group_size(files)
    if size is None:
        return None
    if tensor.bits == 4:
        aligned = inputs.start % GROUP_SIZE == 0 and inputs.stop % GROUP_SIZE == 0
        return 4 if aligned and (size % GROUP_SIZE == 0) else None
    return 8 if tensor.has_one_zero and size >= tensor.shape[1] else None


def _as_int4(codes: Codes, dtype: torch.dtype) -> Quantized:
    """The numbers as they are, with the scale and the zero of each group of GROUP_SIZE: ``scale · (q -
    zero)`` is ``scale · (q - 8) + scale · (8 - zero)``."""
    num_groups = codes.numbers.shape[1] // GROUP_SIZE
    if isinstance(codes.groups, int):
        which = torch.arange(num_groups) * GROUP_SIZE // codes.groups
    else:
        which = codes.groups[::GROUP_SIZE]
    scales = codes.scales[:, which].to(dtype)
    shifts = _INT4_MIDDLE - (codes.zeros if isinstance(codes.zeros, int) else codes.zeros[:, which].float())
    zeros = (scales.float() * shifts).to(dtype)
    return Quantized(codes.numbers, torch.stack((scales, zeros), dim=-1))


def _as_int8(codes: Codes, dtype: torch.dtype) -> Quantized:
    """The numbers less their zero, which is the same for all, with the scale of each output."""
    assert isinstance(codes.zeros, int)
    numbers = codes.numbers
    if codes.zeros:
        numbers = (numbers.short() - codes.zeros).to(torch.int8)
    return Quantized(numbers, codes.scales[:, 0].to(dtype))


def _bytes_in_memory(num_numbers: int, bits: int) -> int:
    """With the scale and the zero of each group, 16 bits each; a scale per output is next to nothing."""
    return num_numbers * 5 // 8 if bits == 4 else num_numbers

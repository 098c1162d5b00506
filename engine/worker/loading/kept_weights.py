"""Weights that stay in the bits of their checkpoint, because a kernel of the CPU reads them.

Linears and experts whose weights are stored in 4 bits with zeros, in MXFP4, or in 8 bits with a scale per
output are replaced by modules with the same numbers when all their tensors are read. Nothing is dequantized
in between, and the memory of their parameters is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import nn

from engine.worker.cpu.kernels.weights import CompiledGemm
from engine.worker.cpu.packed_experts import fits_kernels, kept_experts
from engine.worker.cpu.quantization import GROUP_SIZE, Quantized
from engine.worker.cpu.quantized_linear import can_keep, kept_linear
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.formats.codes import Codes
from engine.worker.loading.formats.mxfp4 import BLOCK, Mxfp4Experts
from engine.worker.loading.formats.packed_ints import CodedTensor
from engine.worker.loading.formats.stored_tensor import StoredTensor, TensorFiles, region_of
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.moe import Experts

_INT4_MIDDLE = 8
"""The zero of a weight that stores none: a kernel's numbers are ``q - 8``."""


@dataclass(slots=True)
class _KeptModule:
    """A linear or a layer's experts, to be replaced."""

    name: str
    """The module's name in the model."""
    bits: int
    weights: tuple[tuple[str, ...], ...]
    """Names of the tensors that fill each weight, in the order of its rows."""
    read: dict[str, Codes | Quantized] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.read) == sum(map(len, self.weights))

    def take(self, weight: int, dtype: torch.dtype) -> Quantized:
        """Return one of its weights, whose tensors are all read, and drop them."""
        convert = _as_int4 if self.bits == 4 else _as_int8
        read = [self.read.pop(name) for name in self.weights[weight]]
        pieces = [each if isinstance(each, Quantized) else convert(each, dtype) for each in read]
        if len(pieces) == 1:
            return pieces[0]
        return Quantized(
            torch.cat([piece.numbers for piece in pieces]), torch.cat([piece.grid for piece in pieces])
        )


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
        """``model``: on the meta device; ``parts``: of all its tensors; ``gemm``: the compiled GEMM, None:
        torch multiplies."""
        self._model = model
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._gemm = gemm
        self._modules: dict[str, _KeptModule] = {}
        self.saved_bytes = 0
        """The bytes saved compared with the model's dtype."""
        by_weight: dict[int, dict[str, TensorPart]] = {}
        for name, part in parts.items():
            by_weight.setdefault(_memory_of(part.view), {})[name] = part
        with TensorFiles() as files:
            for name, module in model.named_modules():
                own = [by_weight.get(_memory_of(weight), {}) for weight in _weights_of(module)]
                self._consider(name, own, files)

    @property
    def names(self) -> frozenset[str]:
        """The checkpoint's tensors that are kept in their bits."""
        return frozenset(self._modules)

    def _consider(
        self,
        module: str,
        parts: Sequence[Mapping[str, TensorPart]],
        files: TensorFiles,
    ) -> None:
        """Keep the module's weights if all tensors that fill them, given per weight, allow it with the same
        number of bits."""
        kinds = {
            _kept_bits(self._checkpoint.tensors[name], part, files)
            for own in parts
            for name, part in own.items()
        }
        bits = kinds.pop() if len(kinds) == 1 else None
        if bits is None or not self._fits(self._model.get_submodule(module), bits):
            return
        ordered = (sorted(own, key=lambda name: own[name].view.storage_offset()) for own in parts)
        kept = _KeptModule(module, bits, tuple(map(tuple, ordered)))
        for own in parts:
            self._modules.update(dict.fromkeys(own, kept))
            count = sum(part.view.numel() for part in own.values())
            self.saved_bytes += count * self._dtype.itemsize - _bytes_in_memory(count, bits)

    def _fits(self, module: nn.Module, bits: int) -> bool:
        """Whether there are kernels for the module's sizes."""
        if isinstance(module, Experts):
            return self._gemm is not None and fits_kernels(module)
        assert isinstance(module, nn.Linear)
        return can_keep(module.out_features, module.in_features, bits, self._gemm)

    def bytes_in_memory(self, name: str, num_numbers: int) -> int:
        """The bytes that ``num_numbers`` numbers of a kept tensor take."""
        return _bytes_in_memory(num_numbers, self._modules[name].bits)

    def fill(self, parts: Mapping[str, TensorPart]) -> None:
        """Like ``Checkpoint.fill``; then replace the modules whose tensors are all read."""
        names = [name for name in parts if name in self._modules]
        self._checkpoint.fill({name: part for name, part in parts.items() if name not in self._modules})
        with TensorFiles() as files:
            for name in names:
                module = self._modules[name]
                module.read[name] = self._read(name, parts[name], files)
                if module.is_complete:
                    self._replace(module)

    def _read(self, name: str, part: TensorPart, files: TensorFiles) -> Codes | Quantized:
        tensor = self._checkpoint.tensors[name]
        region = region_of(tensor.shape, *part.slices)
        if isinstance(tensor, Mxfp4Experts):
            return _as_e2m1(*tensor.e2m1_codes(files, region), self._dtype)
        assert _is_coded(tensor)
        return tensor.codes(files, region)

    def _replace(self, kept: _KeptModule) -> None:
        parent, _, name = kept.name.rpartition(".")
        setattr(self._model.get_submodule(parent), name, self._replacement(kept))

    def _replacement(self, kept: _KeptModule) -> nn.Module:
        plain = self._model.get_submodule(kept.name)
        if isinstance(plain, Experts):
            assert self._gemm is not None
            gate_up = kept.take(0, self._dtype)
            down = kept.take(1, self._dtype)
            return kept_experts(plain, gate_up, down, kept.bits, self._gemm)
        assert isinstance(plain, nn.Linear)
        return kept_linear(kept.take(0, self._dtype), kept.bits, plain.bias, self._gemm)


def _weights_of(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """The weights of a module that a kernel could read in fewer bits."""
    if isinstance(module, Experts):
        return module.gate_up, module.down
    return (module.weight,) if isinstance(module, nn.Linear) else ()


def _memory_of(tensor: torch.Tensor) -> int:
    """An id that all views of a parameter share, on the meta device, too."""
    memory: int = tensor.untyped_storage()._cdata
    return memory


def _is_coded(tensor: StoredTensor) -> TypeGuard[CodedTensor]:
    return hasattr(tensor, "codes")


def _kept_bits(tensor: StoredTensor, part: TensorPart, files: TensorFiles) -> int | None:
    """The bits in which a kernel can read this part of the tensor; None if it must be dequantized."""
    if part.num_pieces > 1:
        return None
    inputs = region_of(tensor.shape, *part.slices)[1]
    if isinstance(tensor, Mxfp4Experts):
        return 4 if inputs.start % BLOCK == 0 and inputs.stop % BLOCK == 0 else None
    if not _is_coded(tensor) or len(tensor.shape) != 2:
        return None
    size = tensor.group_size(files)
    if size is None:
        return None
    if tensor.bits == 4:
        aligned = inputs.start % GROUP_SIZE == 0 and inputs.stop % GROUP_SIZE == 0
        return 4 if aligned and (size % GROUP_SIZE == 0) else None
    return 8 if tensor.has_one_zero and size >= tensor.shape[1] else None


def _as_int4(codes: Codes, dtype: torch.dtype) -> Quantized:
    """The unchanged numbers, with the scale and the zero of each group of GROUP_SIZE: ``scale · (q - zero)``
    is ``scale · (q - 8) + scale · (8 - zero)``."""
    num_groups = codes.numbers.shape[1] // GROUP_SIZE
    if isinstance(codes.groups, int):
        which = torch.arange(num_groups) * GROUP_SIZE // codes.groups
    else:
        which = codes.groups[::GROUP_SIZE]
    scales = codes.scales[:, which].to(dtype)
    shifts = _INT4_MIDDLE - (codes.zeros if isinstance(codes.zeros, int) else codes.zeros[:, which].float())
    zeros = (scales.float() * shifts).to(dtype)
    return Quantized(codes.numbers, torch.stack((scales, zeros), dim=-1))


def _as_e2m1(numbers: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """The unchanged numbers and scales: a power of two is exact in bf16, and there are no zeros."""
    grid = torch.stack((scales, torch.zeros_like(scales)), dim=-1)
    return Quantized(numbers, grid.to(dtype), is_float=True)


def _as_int8(codes: Codes, dtype: torch.dtype) -> Quantized:
    """The numbers minus their common zero, with the scale of each output."""
    assert isinstance(codes.zeros, int)
    numbers = codes.numbers
    if codes.zeros:
        numbers = (numbers.short() - codes.zeros).to(torch.int8)
    return Quantized(numbers, codes.scales[:, 0].to(dtype))


def _bytes_in_memory(num_numbers: int, bits: int) -> int:
    """Includes the scale and the zero of each group, 16 bits each; a scale per output is negligible."""
    return num_numbers * 5 // 8 if bits == 4 else num_numbers

"""Weights in fp8 or int8 with a scale per tensor, output, group of inputs or block: DeepSeek's and Qwen's FP8
(``weight`` and ``weight_scale_inv``, which despite its name is the scale to multiply with), and
compressed-tensors' ``float-quantized``, ``int-quantized`` and ``naive-quantized`` (``weight``,
``weight_scale``, ``weight_zero_point``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.errors import ModelLoadError
from engine.worker.loading.formats.codes import Codes, groups_of
from engine.worker.loading.formats.stored_tensor import (
    Region,
    TensorEntry,
    TensorFiles,
    need_dims,
    need_dtype,
    need_shape,
)

_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """A CodedTensor [outputs, inputs], or a StoredTensor of stacked ones [experts, outputs, inputs]."""

    numbers: TensorEntry
    scale: TensorEntry
    zero_point: TensorEntry | None
    block: tuple[int, int]
    """The outputs and inputs that share a scale; the last blocks may be smaller."""
    bits: int = 8

    @classmethod
    def of(
        cls,
        numbers: TensorEntry,
        scale: TensorEntry,
        zero_point: TensorEntry | None,
        block: tuple[int, int] | None,
    ) -> ScaledWeight:
        """``block``: the block size; None: derive it from the number of scales. Raises ModelLoadError."""
        need_dtype(scale, *_SCALE_DTYPES)
        need_dims(numbers, 2, 3)
        need_dims(scale, 0, 1, len(numbers.shape))
        *stack, num_outputs, num_inputs = numbers.shape
        if len(scale.shape) < 2:  # one for the tensor
            need_shape(scale, (1,) * len(scale.shape))
            block = (num_outputs, num_inputs)
        elif block is None:
            block = _evenly(num_outputs, num_inputs, scale)
        if len(scale.shape) >= 2:
            need_shape(scale, (*stack, -(-num_outputs // block[0]), -(-num_inputs // block[1])))
        if zero_point is not None:
            need_dtype(zero_point, "I8")
            need_shape(zero_point, scale.shape)
        return cls(numbers, scale, zero_point, block)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        more = () if self.zero_point is None else (self.zero_point,)
        return self.numbers, self.scale, *more

    def group_size(self, files: TensorFiles) -> int | None:
        """See CodedTensor."""
        return self.block[1]

    @property
    def has_one_zero(self) -> bool:
        return self.numbers.dtype == "I8" and self.zero_point is None

    def codes(self, files: TensorFiles, region: Region) -> Codes:
        """See CodedTensor."""
        *stack, outputs, inputs = region
        read, groups = groups_of(inputs, self.block[1])
        numbers = files.read(self.numbers, *region).flatten(0, -2)
        scales = self._grid(files, self.scale, stack, outputs, read)
        if self.zero_point is None:
            return Codes(numbers, scales, 0, groups)
        return Codes(numbers, scales, self._grid(files, self.zero_point, stack, outputs, read), groups)

    def _grid(
        self, files: TensorFiles, entry: TensorEntry, stack: list[slice], outputs: slice, groups: slice
    ) -> torch.Tensor:
        """The numbers of ``entry`` for each output and group of inputs: [outputs, groups]."""
        if len(entry.shape) < 2:
            return files.read(entry).float().reshape(1, 1).expand(outputs.stop - outputs.start, 1)
        blocks, which = groups_of(outputs, self.block[0])
        rows = files.read(entry, *stack, blocks, groups).float().flatten(0, -2)
        return rows.repeat_interleave(which, dim=0) if isinstance(which, int) else rows[which]

    def fill(self, view: torch.Tensor, files: TensorFiles, region: Region) -> None:
        """See StoredTensor. Fills a stack one by one, because it may be large."""
        if len(region) == 2:
            return self.codes(files, region).dequantize(view)
        for number, index in enumerate(range(region[0].start, region[0].stop)):
            self.codes(files, (slice(index, index + 1), *region[1:])).dequantize(view[number])
        return None


def _evenly(num_outputs: int, num_inputs: int, scale: TensorEntry) -> tuple[int, int]:
    """The block size if the scales cover the weight evenly."""
    rows, columns = scale.shape[-2:]
    if num_outputs % rows or num_inputs % columns:
        raise ModelLoadError(
            f"Tensor {scale.name} in {scale.file} has shape {list(scale.shape)}, which does not divide its "
            f"weight's {[num_outputs, num_inputs]}."
        )
    return num_outputs // rows, num_inputs // columns

"""Weights of 4 or 8 bits, packed in 32-bit words: the layouts of AWQ (``gemm``), GPTQ, and compressed-tensors
(``pack-quantized``).

AWQ: ``qweight`` [inputs, outputs / 8] packs eight outputs per word, in the order of ``_AWQ_PLACES``;
``qzeros`` [groups, outputs / 8] likewise; ``scales`` [groups, outputs].

GPTQ: ``qweight`` [inputs / per word, outputs] packs consecutive inputs per word, the first in the lowest
bits; ``qzeros`` [groups, outputs / per word], minus one in format v1; ``scales`` [groups, outputs];
``g_idx`` [inputs], each input's group.

compressed-tensors: ``weight_packed`` [outputs, inputs / per word], signed numbers plus half of their range;
``weight_scale`` [outputs, groups]; ``weight_zero_point`` [outputs / per word, groups], packed by outputs,
plus the same half; ``weight_g_idx`` [inputs] in checkpoints with act order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine.worker.loading.formats.codes import Codes, groups_of
from engine.worker.loading.formats.stored_tensor import (
    Region,
    StoredTensor,
    TensorEntry,
    TensorFiles,
    need_dims,
    need_dtype,
    need_entry,
    need_shape,
)

_FLOATS = ("F16", "BF16", "F32")
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of its eight outputs: from the lowest bits up, a word holds the outputs 0, 2,
4, 6, 1, 3, 5, 7."""
_WORD_BITS = 32


class CodedTensor(StoredTensor, Protocol):
    """A weight [outputs, inputs] in few bits, which a kernel may read without dequantizing."""

    @property
    def bits(self) -> int:
        """The number of bits of a number."""

    @property
    def has_one_zero(self) -> bool:
        """Whether its numbers are integers that all have the same zero."""

    def codes(self, files: TensorFiles, region: Region) -> Codes:
        """Read a region of the weight."""

    def group_size(self, files: TensorFiles) -> int | None:
        """The number of consecutive inputs per scale; None if a group's inputs are not consecutive."""


@dataclass(frozen=True, slots=True)
class AwqWeight:
    """A CodedTensor of AWQ."""

    qweight: TensorEntry
    qzeros: TensorEntry
    scales: TensorEntry
    size: int
    """The number of inputs per scale."""
    bits: int = 4

    @classmethod
    def of(cls, entries: dict[str, TensorEntry], prefix: str, group_size: int) -> AwqWeight:
        """The weight with this prefix; ``group_size`` -1: one group. Raises ModelLoadError."""
        qweight = entries[f"{prefix}qweight"]
        qzeros, scales = (need_entry(entries, prefix + name, qweight) for name in ("qzeros", "scales"))
        need_dtype(qweight, "I32")
        need_dims(qweight, 2)
        need_dtype(qzeros, "I32")
        need_dtype(scales, *_FLOATS)
        num_inputs, num_words = qweight.shape
        size = num_inputs if group_size == -1 else group_size
        groups = -(-num_inputs // size)
        need_shape(qzeros, (groups, num_words))
        need_shape(scales, (groups, num_words * _per_word(4)))
        return cls(qweight, qzeros, scales, size)

    @property
    def shape(self) -> tuple[int, ...]:
        num_inputs, num_words = self.qweight.shape
        return num_words * _per_word(4), num_inputs

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return self.qweight, self.qzeros, self.scales

    def group_size(self, files: TensorFiles) -> int | None:
        """See CodedTensor."""
        return self.size

    @property
    def has_one_zero(self) -> bool:
        return False

    def codes(self, files: TensorFiles, region: Region) -> Codes:
        """See CodedTensor."""
        outputs, inputs = region
        words, within = _words_of(outputs, _per_word(4))
        read, groups = groups_of(inputs, self.size)
        numbers = _awq_unpacked(files.read(self.qweight, inputs, words))[within]
        zeros = _awq_unpacked(files.read(self.qzeros, read, words))[within]
        return Codes(numbers, files.read(self.scales, read, outputs).T, zeros, groups)

    def fill(self, view: torch.Tensor, files: TensorFiles, region: Region) -> None:
        """See StoredTensor."""
        self.codes(files, region).dequantize(view)


@dataclass(frozen=True, slots=True)
class GptqWeight:
    """A CodedTensor of GPTQ."""

    qweight: TensorEntry
    qzeros: TensorEntry
    scales: TensorEntry
    g_idx: TensorEntry | None
    bits: int
    size: int
    """The number of inputs per scale."""
    zero_less: int
    """The zero minus the stored zero: 1 in format v1, which cannot store -1 and wraps around."""

    @classmethod
    def of(
        cls, entries: dict[str, TensorEntry], prefix: str, group_size: int, bits: int, zero_less: int
    ) -> GptqWeight:
        """The weight with this prefix; ``group_size`` -1: one group. Raises ModelLoadError."""
        qweight = entries[f"{prefix}qweight"]
        qzeros, scales = (need_entry(entries, prefix + name, qweight) for name in ("qzeros", "scales"))
        g_idx = entries.get(f"{prefix}g_idx")
        need_dtype(qweight, "I32")
        need_dims(qweight, 2)
        need_dtype(qzeros, "I32")
        need_dtype(scales, *_FLOATS)
        per_word = _per_word(bits)
        num_inputs = qweight.shape[0] * per_word
        num_outputs = qweight.shape[1]
        size = num_inputs if group_size == -1 else group_size
        groups = -(-num_inputs // size)
        need_shape(scales, (groups, num_outputs))
        need_shape(qzeros, (groups, -(-num_outputs // per_word)))
        if g_idx is not None:
            need_dtype(g_idx, "I32", "I64")
            need_shape(g_idx, (num_inputs,))
        return cls(qweight, qzeros, scales, g_idx, bits, size, zero_less)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.qweight.shape[1], self.qweight.shape[0] * _per_word(self.bits)

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        index = () if self.g_idx is None else (self.g_idx,)
        return self.qweight, self.qzeros, self.scales, *index

    def group_size(self, files: TensorFiles) -> int | None:
        """See CodedTensor."""
        in_order = self.g_idx is None or _in_order(files.read(self.g_idx), self.size)
        return self.size if in_order else None

    @property
    def has_one_zero(self) -> bool:
        return False  # its zeros are in a tensor, even if they are all equal

    def codes(self, files: TensorFiles, region: Region) -> Codes:
        """See CodedTensor."""
        outputs, inputs = region
        read, groups = _read_groups(self, self.g_idx, self.scales.shape[0], files, inputs)
        per_word = _per_word(self.bits)
        words, within = _words_of(inputs, per_word)
        numbers = unpacked(files.read(self.qweight, words, outputs).T, self.bits)[:, within]
        words, within = _words_of(outputs, per_word)
        zeros = unpacked(files.read(self.qzeros, read, words), self.bits)[:, within]
        if self.zero_less:
            zeros = (zeros.short() + self.zero_less) & ((1 << self.bits) - 1)
        return Codes(numbers, files.read(self.scales, read, outputs).T, zeros.T, groups)

    def fill(self, view: torch.Tensor, files: TensorFiles, region: Region) -> None:
        """See StoredTensor."""
        self.codes(files, region).dequantize(view)


@dataclass(frozen=True, slots=True)
class PackQuantizedWeight:
    """A CodedTensor of compressed-tensors' ``pack-quantized``."""

    packed: TensorEntry
    scale: TensorEntry
    zero_point: TensorEntry | None
    g_idx: TensorEntry | None
    bits: int
    size: int
    """The number of inputs per scale."""

    @classmethod
    def of(
        cls, entries: dict[str, TensorEntry], prefix: str, bits: int, group_size: int, symmetric: bool
    ) -> PackQuantizedWeight:
        """The weight with this prefix; ``group_size`` -1: one group. Raises ModelLoadError."""
        packed = entries[f"{prefix}weight_packed"]
        scale = need_entry(entries, f"{prefix}weight_scale", packed)
        zero_point = None if symmetric else need_entry(entries, f"{prefix}weight_zero_point", packed)
        g_idx = entries.get(f"{prefix}weight_g_idx")
        need_dtype(packed, "I32")
        need_dims(packed, 2)
        need_dtype(scale, *_FLOATS)
        num_outputs = packed.shape[0]
        num_inputs = packed.shape[1] * _per_word(bits)
        size = num_inputs if group_size == -1 else group_size
        need_shape(scale, (num_outputs, -(-num_inputs // size)))
        if zero_point is not None:
            need_dtype(zero_point, "I32")
            need_shape(zero_point, (-(-num_outputs // _per_word(bits)), scale.shape[1]))
        if g_idx is not None:
            need_dtype(g_idx, "I32", "I64")
            need_shape(g_idx, (num_inputs,))
        return cls(packed, scale, zero_point, g_idx, bits, size)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed.shape[0], self.packed.shape[1] * _per_word(self.bits)

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        more = (entry for entry in (self.zero_point, self.g_idx) if entry is not None)
        return self.packed, self.scale, *more

    def group_size(self, files: TensorFiles) -> int | None:
        """See CodedTensor."""
        in_order = self.g_idx is None or _in_order(files.read(self.g_idx), self.size)
        return self.size if in_order else None

    @property
    def has_one_zero(self) -> bool:
        return self.zero_point is None

    def codes(self, files: TensorFiles, region: Region) -> Codes:
        """See CodedTensor."""
        outputs, inputs = region
        read, groups = _read_groups(self, self.g_idx, self.scale.shape[1], files, inputs)
        words, within = _words_of(inputs, _per_word(self.bits))
        numbers = unpacked(files.read(self.packed, outputs, words), self.bits)[:, within]
        zeros: torch.Tensor | int = 1 << (self.bits - 1)
        if self.zero_point is not None:
            words, within = _words_of(outputs, _per_word(self.bits))
            zeros = unpacked(files.read(self.zero_point, words, read).T, self.bits)[:, within].T
        return Codes(numbers, files.read(self.scale, outputs, read), zeros, groups)

    def fill(self, view: torch.Tensor, files: TensorFiles, region: Region) -> None:
        """See StoredTensor."""
        self.codes(files, region).dequantize(view)


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """words [n, m], int32 -> [n, m * 32 / bits], uint8, from the lowest bits of each word up"""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def _awq_unpacked(words: torch.Tensor) -> torch.Tensor:
    """words [inputs, n], int32 -> [8 * n, inputs], uint8"""
    by_output = words.T.contiguous()
    numbers = torch.empty(len(by_output), 8, len(words), dtype=torch.uint8)
    for output, place in enumerate(_AWQ_PLACES):
        numbers[:, output] = (by_output >> 4 * place) & 15
    return numbers.flatten(0, 1)


def _per_word(bits: int) -> int:
    return _WORD_BITS // bits


def _words_of(numbers: slice, per_word: int) -> tuple[slice, slice]:
    """The words that hold these numbers, and the slice of the numbers within these words."""
    first = numbers.start // per_word
    last = -(-numbers.stop // per_word)
    skipped = first * per_word
    return slice(first, last), slice(numbers.start - skipped, numbers.stop - skipped)


def _in_order(groups: torch.Tensor, size: int) -> bool:
    return bool((groups == torch.arange(len(groups)) // size).all())


def _read_groups(
    weight: CodedTensor, g_idx: TensorEntry | None, num_groups: int, files: TensorFiles, inputs: slice
) -> tuple[slice, torch.Tensor | int]:
    """Like ``groups_of``, for a weight whose inputs may be in any order."""
    size = weight.group_size(files)
    if size is not None:
        return groups_of(inputs, size)
    assert g_idx is not None
    return slice(0, num_groups), files.read(g_idx, inputs).long()

"""Stacked experts in MXFP4, as gpt-oss stores them: ``*_blocks`` [experts, outputs, inputs / 32, 16], two
numbers per byte, the first in its low half, and ``*_scales`` [experts, outputs, inputs / 32], powers of two.

The formats follow the OCP Microscaling specification, version 1.0: e2m1 numbers, e8m0 scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.worker.loading.formats.stored_tensor import (
    Region,
    TensorEntry,
    TensorFiles,
    need_dims,
    need_dtype,
    need_entry,
    need_shape,
)

BLOCK = 32
"""Inputs that share a scale."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127


@dataclass(frozen=True, slots=True)
class Mxfp4Experts:
    """A StoredTensor [experts, inputs, outputs]: the outputs are last, as in a plain checkpoint."""

    blocks: TensorEntry
    scales: TensorEntry

    @classmethod
    def of(cls, entries: dict[str, TensorEntry], name: str) -> Mxfp4Experts:
        """The experts whose blocks are named ``name`` and ``_blocks``. Raises ModelLoadError."""
        blocks = entries[f"{name}_blocks"]
        scales = need_entry(entries, f"{name}_scales", blocks)
        need_dtype(blocks, "U8")
        need_dtype(scales, "U8")
        need_dims(blocks, 4)
        need_shape(blocks, (*blocks.shape[:3], BLOCK // 2))
        need_shape(scales, blocks.shape[:3])
        return cls(blocks, scales)

    @property
    def shape(self) -> tuple[int, ...]:
        num_experts, num_outputs, num_blocks = self.scales.shape
        return num_experts, num_blocks * BLOCK, num_outputs

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return self.blocks, self.scales

    def fill(self, view: torch.Tensor, files: TensorFiles, region: Region) -> None:
        """See StoredTensor. Fills expert by expert, because together they are most of the model."""
        experts, inputs, outputs = region
        read = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
        within = slice(inputs.start - read.start * BLOCK, inputs.stop - read.start * BLOCK)
        for number, expert in enumerate(range(experts.start, experts.stop)):
            one = slice(expert, expert + 1)
            blocks = files.read(self.blocks, one, outputs, read, slice(0, BLOCK // 2))[0]
            scales = files.read(self.scales, one, outputs, read)[0]
            dequantized = mxfp4_numbers(blocks.to(view.device), scales.to(view.device))
            view[number].copy_(dequantized[:, within].T)

    def e2m1_codes(self, files: TensorFiles, region: Region) -> tuple[torch.Tensor, torch.Tensor]:
        """Read a region of whole blocks without dequantizing: e2m1 numbers [experts * outputs, inputs],
        uint8, and their scales [experts * outputs, inputs / 32], fp32."""
        experts, inputs, outputs = region
        read = slice(inputs.start // BLOCK, inputs.stop // BLOCK)
        blocks = files.read(self.blocks, experts, outputs, read, slice(0, BLOCK // 2))
        scales = files.read(self.scales, experts, outputs, read).flatten(0, 1)
        numbers = torch.stack((blocks & 15, blocks >> 4), dim=-1)
        return numbers.view(len(scales), -1), torch.ldexp(torch.ones(scales.shape), scales.int() - _E8M0_BIAS)


def mxfp4_numbers(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks [n, m, 16], scales [n, m], both uint8 -> [n, 32 * m], float32"""
    pairs = _pairs().to(blocks.device)[blocks.int()].flatten(2)
    return torch.ldexp(pairs, scales[..., None].int() - _E8M0_BIAS).flatten(1)


def _pairs() -> torch.Tensor:
    """The two numbers of each byte, [256, 2]."""
    signed = torch.tensor([*_E2M1, *(-number for number in _E2M1)])
    octets = torch.arange(256)
    return torch.stack((signed[octets & 15], signed[octets >> 4]), dim=-1)

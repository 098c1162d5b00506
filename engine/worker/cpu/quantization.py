"""Weight-only quantization to int8 per output or int4 in groups of inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

GROUP_SIZE = 32
"""Inputs that share a scale and a zero in int4, which takes 5 bits per number. torch supports larger groups,
too; the compiled kernels do not."""
_ROWS = 1024
"""Rows quantized at a time: memory may not suffice for a float32 copy of all of them."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight that was already quantized, as ``to_int8`` or ``to_int4`` would return it."""

    numbers: torch.Tensor
    """Numbers q [outputs, inputs]; for int4, any integer type that holds 0 to 15."""
    grid: torch.Tensor
    """The scales [outputs] for int8, or the scales and zeros [outputs, groups, 2] for int4."""
    is_float: bool = False
    """Whether the 4-bit numbers are floats (e2m1), ``w = scale · value(q) + zero``."""

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def dtype(self) -> torch.dtype:
        """The type of the activations that the weight is multiplied with."""
        return self.grid.dtype

    def parts(self, num_rows: int) -> Iterator[Quantized]:
        """Iterate over the weight in parts of ``num_rows`` rows."""
        for numbers, grid in zip(
            torch.split(self.numbers, num_rows), torch.split(self.grid, num_rows), strict=True
        ):
            yield replace(self, numbers=numbers, grid=grid)

    def padded(self, num_rows: int) -> Quantized:
        """The weight with ``num_rows`` rows of zeros appended."""
        grid = pad(self.grid, (0, 0) * (self.grid.dim() - 1) + (0, num_rows))
        return replace(self, numbers=pad(self.numbers, (0, 0, 0, num_rows)), grid=grid)

    def in_order(self, rows: torch.Tensor) -> Quantized:
        """The weight with its rows in this order [outputs]."""
        return replace(self, numbers=self.numbers[rows], grid=self.grid[rows])


AnyWeight = torch.Tensor | Quantized
"""A weight [outputs, inputs], to be quantized or already quantized."""


def to_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``row ≈ scale · q``: q [n, inputs] in [-127, 127] and the scales [n] in the type of the rows."""
    scales = (rows.abs().amax(dim=1).float() / 127).clamp_min(torch.finfo(rows.dtype).tiny).to(rows.dtype)
    numbers = (rows.float() / scales.float()[:, None]).round_().clamp_(-127, 127)
    return numbers.to(torch.int8), scales


def to_int4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``row ≈ scale · (q - 8) + zero``: q [n, inputs] in [0, 15] and, in the type of the rows, the scale and
    the zero of each group of GROUP_SIZE inputs [n, groups, 2]."""
    groups = rows.float().view(len(rows), -1, GROUP_SIZE)
    low = groups.amin(-1)
    high = groups.amax(-1)
    scales = ((high - low) / 15).clamp_min(torch.finfo(rows.dtype).tiny)
    grid = torch.stack([scales, low + 8 * scales], dim=-1).to(rows.dtype)
    scales, zeros = grid.float().unbind(-1)  # quantize to scales and zeros as they are stored
    units = (groups - zeros[..., None]).div_(scales[..., None]).round_()
    return units.add_(8).clamp_(0, 15).flatten(1).to(torch.int32), grid


def by_rows(
    weight: AnyWeight, *kept: torch.Tensor, block: int = 1
) -> Iterator[tuple[AnyWeight, tuple[torch.Tensor, ...]]]:
    """Iterate over ``weight`` in parts of ``_ROWS`` rows, with the matching parts of ``kept``, whose entries
    each cover ``block`` rows."""
    rows = weight.parts(_ROWS) if isinstance(weight, Quantized) else iter(torch.split(weight, _ROWS))
    parts = zip(*(torch.split(tensor, _ROWS // block) for tensor in kept), strict=True)
    return zip(rows, parts, strict=True)


def as_int8(rows: AnyWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``to_int8``."""
    return (rows.numbers, rows.grid) if isinstance(rows, Quantized) else to_int8(rows)


def as_int4(rows: AnyWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``to_int4``."""
    return (rows.numbers, rows.grid) if isinstance(rows, Quantized) else to_int4(rows)


def whole_blocks(rows: AnyWeight, block: int) -> AnyWeight:
    """``rows`` padded with zeros to whole blocks."""
    missing = -rows.shape[0] % block
    return rows.padded(missing) if isinstance(rows, Quantized) else pad(rows, (0, 0, 0, missing))

"""Weight-only quantization to int8 per output or int4 in groups of inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

GROUP_SIZE = 32
"""Inputs that share a scale and a zero in int4, which makes 5 bits per number. torch supports larger groups
too, the compiled kernels do not."""
_ROWS = 1024
"""Rows quantized at a time: there may be no memory for a float32 copy of all of them."""


def to_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``row ≈ scale · q``: q [n, inputs] in [-127, 127] and the scales [n], these in the type of the rows."""
    scales = (rows.abs().amax(dim=1).float() / 127).clamp_min(torch.finfo(rows.dtype).tiny).to(rows.dtype)
    numbers = (rows.float() / scales.float()[:, None]).round_().clamp_(-127, 127)
    return numbers.to(torch.int8), scales


def to_int4(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``row ≈ scale · (q - 8) + zero``: q [n, inputs] in [0, 15] and, in the type of the rows, the scale and
    the zero of each group of GROUP_SIZE inputs [n, groups, 2]."""
    groups = rows.float().view(len(rows), -1, GROUP_SIZE)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / 15).clamp_min(torch.finfo(rows.dtype).tiny)
    grid = torch.stack([scales, low + 8 * scales], dim=-1).to(rows.dtype)
    scales, zeros = grid.float().unbind(-1)  # quantize to scales and zeros as they are stored
    units = (groups - zeros[..., None]).div_(scales[..., None]).round_()
    return units.add_(8).clamp_(0, 15).flatten(1).to(torch.int32), grid


def by_rows(weight: torch.Tensor, *kept: torch.Tensor, block: int = 1) -> Iterator[tuple[torch.Tensor, ...]]:
    """Iterate over ``weight`` in parts of ``_ROWS`` rows, with the matching parts of ``kept``, whose entries
    each cover ``block`` rows."""
    parts = (torch.split(tensor, _ROWS // block) for tensor in kept)
    return zip(torch.split(weight, _ROWS), *parts, strict=True)

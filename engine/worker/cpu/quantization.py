"""Rounding a weight to 8 or 4 bits: which numbers, and what they stand for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

GROUP_SIZE = 32
"""Inputs that share a scale and a zero in 4 bits, which so take 5; torch knows larger ones, the compiled code
does not."""
_ROWS = 1024
"""Rounded together: there may be no room for a copy of all in 32 bits."""


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
    scales, zeros = grid.float().unbind(-1)  # as they are kept: the rounding is to these
    units = (groups - zeros[..., None]).div_(scales[..., None]).round_()
    return units.add_(8).clamp_(0, 15).flatten(1).to(torch.int32), grid


def by_rows(weight: torch.Tensor, *kept: torch.Tensor, block: int = 1) -> Iterator[tuple[torch.Tensor, ...]]:
    """Some rows of ``weight`` and what is kept of them, part by part; an entry of ``kept`` is for ``block``
    rows."""
    parts = (torch.split(tensor, _ROWS // block) for tensor in kept)
    return zip(torch.split(weight, _ROWS), *parts, strict=True)

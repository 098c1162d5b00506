"""Measures how far a result is from the expected one."""

from __future__ import annotations

import torch

LIMITS = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float8_e4m3fn: 5e-2}
"""Limits of ``row_error``. On average, one rounding of a row of noise to bf16 is an error of 1.6e-3, one to
fp8 2.6e-2."""


def row_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest |found - expected| / |expected| of any row (last axis); NaN if any is."""
    found = found.double()
    expected = expected.double()
    difference = (found - expected).norm(dim=-1)
    return float((difference / expected.norm(dim=-1).clamp(min=1e-12)).max())


def picked(pages: torch.Tensor, *index: torch.Tensor) -> torch.Tensor:
    """Returns pages[index] in fp32; indexes bytes where torch cannot index 8-bit numbers."""
    whole = pages.view(torch.uint8) if pages.dtype.itemsize == 1 else pages
    return whole[index].view(pages.dtype).float()


def share_of_bytes_that_differ(found: torch.Tensor, expected: torch.Tensor) -> float:
    own, other = (each.contiguous().view(torch.uint8) for each in (found, expected))
    return float((own != other).float().mean())

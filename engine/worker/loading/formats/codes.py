"""Part of a weight in few bits, with its scales and zeros."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ROWS = 128
"""Rows dequantized at a time: in float32 they should fit in the cache, as several operations read them."""
_E4M3_IN_HALVES = 256.0
"""Factor that restores a float8_e4m3fn placed in the highest bits of a float16: its exponent bias is 7, not
15."""
_SIGN_AND_REST = -0x4001
"""A mask of all 16 bits except the second highest."""


@dataclass(frozen=True, slots=True)
class Codes:
    """Part of a weight [outputs, inputs]: ``w = scale · (q - zero)``."""

    numbers: torch.Tensor
    """Numbers q [outputs, inputs]: unsigned or signed integers, or fp8."""
    scales: torch.Tensor
    """A scale for each output and group of inputs, [outputs, groups]."""
    zeros: torch.Tensor | int
    """The zeros, shaped like the scales; or one for all."""
    groups: torch.Tensor | int
    """The group of each input [inputs]; or the number of consecutive inputs per group, if in order."""

    def dequantize(self, view: torch.Tensor) -> None:
        """Write the weight [outputs, inputs] to ``view``, rounded once, to its dtype; on its device."""
        codes = self._on(view.device)
        for first in range(0, len(self.numbers), _ROWS):
            rows = slice(first, first + _ROWS)
            view[rows].copy_(codes._dequantized(rows))

    def _on(self, device: torch.device) -> Codes:
        """The same codes on a device; this copies fewer bytes than the weight has."""
        zeros, groups = (
            part if isinstance(part, int) else part.to(device) for part in (self.zeros, self.groups)
        )
        return Codes(self.numbers.to(device), self.scales.to(device), zeros, groups)

    def _dequantized(self, rows: slice) -> torch.Tensor:
        numbers = _as_floats(self.numbers[rows])
        if isinstance(self.groups, int):
            numbers = numbers.view(len(numbers), -1, self.groups)
        if not isinstance(self.zeros, int):
            numbers -= self._for_inputs(self.zeros[rows])
        elif self.zeros:
            numbers -= self.zeros
        numbers *= self._for_inputs(self.scales[rows])
        return numbers.flatten(1)

    def _for_inputs(self, grid: torch.Tensor) -> torch.Tensor:
        """Expand [outputs, groups] to float32, in a shape that can be combined with the numbers."""
        if isinstance(self.groups, int):
            return grid.float()[..., None]
        return grid.float()[:, self.groups]


def _as_floats(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers in float32. It converts fp8 by its bits, ten times as fast as torch; fp8 has no
    infinities, and no weight is NaN."""
    if numbers.dtype != torch.float8_e4m3fn:
        return numbers.float()
    halves = ((numbers.view(torch.int8).short() << 8) >> 1).bitwise_and_(_SIGN_AND_REST)
    return halves.view(torch.float16).float().mul_(_E4M3_IN_HALVES)


def groups_of(inputs: slice, group_size: int) -> tuple[slice, torch.Tensor | int]:
    """The groups of a weight that contain these inputs, and ``Codes.groups`` for the region."""
    first = inputs.start // group_size
    last = -(-inputs.stop // group_size)
    if inputs.start % group_size == 0 and inputs.stop % group_size == 0:
        return slice(first, last), group_size
    return slice(first, last), torch.arange(inputs.start, inputs.stop) // group_size - first

"""What of a checkpoint's tensor a process needs, and where that goes. Knows neither files nor models."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One of ``count`` equal parts of a tensor, cut along ``dim``; by default all of it."""

    view: torch.Tensor
    """The part of a parameter that it fills."""
    dim: int = 0
    index: int = 0
    count: int = 1

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        return tuple(
            size * self.count if dim == self.dim else size for dim, size in enumerate(self.view.shape)
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where the part lies in the checkpoint's tensor."""
        length = self.view.shape[self.dim]
        start = self.index * length
        return (*(slice(None),) * self.dim, slice(start, start + length))

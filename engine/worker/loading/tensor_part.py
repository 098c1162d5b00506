"""The part of a checkpoint's tensor that a process needs, and the parameter that it fills. Knows neither
files nor models."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One of ``count`` equal parts of a tensor, split along ``dim``; by default the whole tensor. If the
    tensor is ``num_pieces`` equal pieces, one after the other along ``dim``, it is a part of each of them."""

    view: torch.Tensor
    """The view of a parameter that this part fills."""
    dim: int = 0
    index: int = 0
    count: int = 1
    num_pieces: int = 1

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        return tuple(
            size * self.count if dim == self.dim else size for dim, size in enumerate(self.view.shape)
        )

    @property
    def slices(self) -> tuple[tuple[slice, ...], ...]:
        """The slices of the checkpoint's tensor that select this part, of one piece after the other."""
        length = self.view.shape[self.dim] // self.num_pieces
        starts = ((piece * self.count + self.index) * length for piece in range(self.num_pieces))
        return tuple((*(slice(None),) * self.dim, slice(start, start + length)) for start in starts)

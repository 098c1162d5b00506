"""The part of a checkpoint's tensor that a process needs, and the parameter that it fills. Knows neither
files nor models."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One of ``count`` equal parts of a tensor, split along ``dim``; by default the whole tensor. If the
    tensor consists of ``num_pieces`` equal pieces along ``dim``, it is a part of each piece."""

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
        """The slices of the checkpoint's tensor that select this part, piece by piece."""
        length = self.view.shape[self.dim] // self.num_pieces
        starts = ((piece * self.count + self.index) * length for piece in range(self.num_pieces))
        return tuple((*(slice(None),) * self.dim, slice(start, start + length)) for start in starts)

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        """The parts of ``view`` that ``slices`` fill, in their order."""
        return torch.chunk(self.view, self.num_pieces, self.dim)


@dataclass(frozen=True, slots=True)
class Section:
    """Consecutive rows of a tensor, of which one of ``count`` parts is needed."""

    length: int
    """Rows of the part."""
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class SectionedPart(TensorPart):
    """A part of each of several sections of a tensor. The sections follow each other along its first
    dimension and may differ in length."""

    sections: tuple[Section, ...] = ()

    @classmethod
    def of(cls, view: torch.Tensor, sections: tuple[Section, ...]) -> SectionedPart:
        return cls(view, num_pieces=len(sections), sections=sections)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return (sum(each.length * each.count for each in self.sections), *self.view.shape[1:])

    @property
    def slices(self) -> tuple[tuple[slice, ...], ...]:
        slices = []
        end = 0
        for each in self.sections:
            start = end + each.index * each.length
            slices.append((slice(start, start + each.length),))
            end += each.length * each.count
        return tuple(slices)

    @property
    def views(self) -> tuple[torch.Tensor, ...]:
        return torch.split(self.view, [each.length for each in self.sections])

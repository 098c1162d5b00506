"""A model's tensor as a checkpoint stores it: in one tensor of a file, or in several."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import safe_open

from engine.errors import ModelLoadError

_COMPARED_BYTES = 2**24

Region = tuple[slice, ...]
"""A slice with start and stop for each dimension."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place in its file, dtype and shape."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    """The dtype by its safetensors name."""
    num_bytes: int


def same_content(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two plain tensors hold the same numbers; reads them in pieces, up to the first difference."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    with TensorFiles() as files:
        num_rows = one.shape[0]
        size = max(1, _COMPARED_BYTES * num_rows // max(1, one.num_bytes))
        pieces = (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))
        return all(torch.equal(files.read(one, piece), files.read(other, piece)) for piece in pieces)


class TensorFiles:
    """The files of a checkpoint, opened when needed. A context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._opened: dict[Path, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
        self._stack.close()

    def read(self, entry: TensorEntry, *region: slice) -> torch.Tensor:
        """Read a tensor, or only this region of it, into host memory."""
        file = self._opened.get(entry.file)
        if file is None:
            file = self._stack.enter_context(safe_open(entry.file, framework="pt", device="cpu"))
            self._opened[entry.file] = file
        if _is_whole(entry.shape, region):
            tensor: torch.Tensor = file.get_tensor(entry.name)
            return tensor
        part: torch.Tensor = file.get_slice(entry.name)[region]
        return part


class StoredTensor(Protocol):
    """A tensor of a model, however the files store it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the model."""

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """The tensors of the files that hold it; the first names it in errors."""

    def fill(self, view: torch.Tensor, files: TensorFiles, region: Region) -> None:
        """Fill ``view`` with this region of the tensor, in the dtype of the view."""


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A StoredTensor that is one tensor of a file."""

    entry: TensorEntry

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        return (self.entry,)

    def fill(self, view: torch.Tensor, files: TensorFiles, region: Region) -> None:
        """See StoredTensor."""
        view.copy_(files.read(self.entry, *region))


def whole_region(shape: tuple[int, ...]) -> Region:
    return tuple(slice(0, size) for size in shape)


def region_of(shape: tuple[int, ...], slices: tuple[slice, ...]) -> Region:
    """``slices``, which may omit the last dims, as a region."""
    given = (slice(*part.indices(size)) for part, size in zip(slices, shape, strict=False))
    return (*given, *whole_region(shape[len(slices) :]))


def need_shape(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    """Raise ModelLoadError if a tensor that belongs to a weight has another shape than the weight implies."""
    if entry.shape != shape:
        raise ModelLoadError(
            f"Tensor {entry.name} in {entry.file} has shape {list(entry.shape)}, "
            f"but its weight needs {list(shape)}."
        )


def need_dims(entry: TensorEntry, *counts: int) -> None:
    """Raise ModelLoadError if a tensor that belongs to a weight has another number of dims."""
    if len(entry.shape) not in counts:
        raise ModelLoadError(
            f"Tensor {entry.name} in {entry.file} has shape {list(entry.shape)}, "
            f"but its weight's format needs {' or '.join(map(str, counts))} dims."
        )


def need_dtype(entry: TensorEntry, *dtypes: str) -> None:
    """Raise ModelLoadError if a tensor that belongs to a weight has none of these types."""
    if entry.dtype not in dtypes:
        raise ModelLoadError(
            f"Tensor {entry.name} in {entry.file} is stored as {entry.dtype}, "
            f"but its weight's format needs {' or '.join(dtypes)}."
        )


def need_entry(entries: dict[str, TensorEntry], name: str, of: TensorEntry) -> TensorEntry:
    """The entry with this name, which the weight of the entry ``of`` needs. ModelLoadError if missing."""
    if name not in entries:
        raise ModelLoadError(f"Tensor {name}, which {of.name} in {of.file} needs, is missing.")
    return entries[name]


def _is_whole(shape: tuple[int, ...], region: Region) -> bool:
    return all(part.start == 0 and part.stop == size for part, size in zip(region, shape, strict=False))

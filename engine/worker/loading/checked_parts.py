"""Checks that a checkpoint has the tensors that a model needs, before any memory is allocated for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.errors import ModelLoadError
from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.tensor_part import TensorPart


def check_parts(checkpoint: Checkpoint, parts: Mapping[str, TensorPart], owner: str, folder: Path) -> None:
    """Raise ModelLoadError unless every part exists with its shape, and with a type that can be cast.
    ``owner``: the model or head that needs them, for errors."""
    for name, part in parts.items():
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"Tensor {name} of {owner} is missing from {folder}.")
        if tensor.shape != part.whole_shape:
            raise ModelLoadError(
                f"Tensor {name} in {tensor.entries[0].file} has shape {list(tensor.shape)}, "
                f"but {owner} needs {list(part.whole_shape)}."
            )
    for dtype in {part.view.dtype for part in parts.values() if part.view.is_floating_point()}:
        checkpoint.check_types([name for name, part in parts.items() if part.view.dtype == dtype], dtype)

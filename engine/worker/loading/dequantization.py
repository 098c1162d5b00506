"""Logs which of a quantized checkpoint's weights are dequantized, and dequantizes them for transformers' own
loader."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from engine.worker.loading.checkpoint import Checkpoint
from engine.worker.loading.formats.stored_tensor import (
    PlainTensor,
    StoredTensor,
    TensorFiles,
    whole_region,
)
from engine.worker.loading.kept_weights import KeptWeights
from engine.worker.loading.load_plan import LoadPlan
from engine.worker.loading.tensor_part import TensorPart
from engine.worker.memory import as_gib

logger = logging.getLogger(__name__)


def log_dequantization(
    plan: LoadPlan,
    checkpoint: Checkpoint,
    parts: Mapping[str, TensorPart],
    kept: KeptWeights | None,
) -> None:
    """Log in advance how many bytes of quantized weights are dequantized and how many are kept."""
    names = frozenset[str]() if kept is None else kept.names
    dequantized = stored = stays = 0.0
    for name, part in parts.items():
        tensor = checkpoint.tensors[name]
        numbers = part.view.numel()
        if isinstance(tensor, PlainTensor):
            continue
        if kept is not None and name in names:
            stays += kept.bytes_in_memory(name, numbers)
        else:
            stored += _stored_bytes(tensor) * numbers / prod(tensor.shape)
            dequantized += numbers * plan.dtype.itemsize
    _log(plan, stored, dequantized, stays)


def log_dequantization_of_all(plan: LoadPlan, checkpoint: Checkpoint) -> None:
    """Like ``log_dequantization``, for a model that keeps nothing."""
    coded = [tensor for tensor in checkpoint.tensors.values() if not isinstance(tensor, PlainTensor)]
    dequantized = sum(prod(tensor.shape) for tensor in coded) * plan.dtype.itemsize
    _log(plan, sum(map(_stored_bytes, coded)), dequantized, 0)


def _log(plan: LoadPlan, stored: float, dequantized: float, stays: float) -> None:
    if plan.weight_format is None:
        return
    title = plan.weight_format.title
    dtype = str(plan.dtype).removeprefix("torch.")
    if stays:
        logger.info("%s weights stay quantized: %s in memory.", title, as_gib(int(stays)))
    if dequantized:
        logger.info(
            "%s weights are dequantized to %s: no kernel here reads them; %s -> %s.",
            title,
            dtype,
            as_gib(int(stored)),
            as_gib(int(dequantized)),
        )


def _stored_bytes(tensor: StoredTensor) -> int:
    return sum(entry.num_bytes for entry in tensor.entries)


@dataclass(frozen=True, slots=True)
class LateTensor:
    """A tensor that is read and dequantized when transformers indexes it by ``...``, as it does with slices
    of safetensors."""

    tensor: StoredTensor
    files: TensorFiles
    dtype: torch.dtype

    def __getitem__(self, _: Any) -> torch.Tensor:
        if isinstance(self.tensor, PlainTensor):
            return self.files.read(self.tensor.entry)
        dequantized = torch.empty(self.tensor.shape, dtype=self.dtype)
        self.tensor.fill(dequantized, self.files, whole_region(self.tensor.shape))
        return dequantized

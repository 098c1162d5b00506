"""Computes the answer of a pooling model from the hidden states of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from safetensors.torch import load_file
from torch import nn

from engine.errors import ModelLoadError
from engine.records.pooling import WHOLE_PROMPT_TASKS, Pooled, PoolingParams
from engine.worker.pooling.pooling_folder import ACTIVATIONS, DenseFolder, PoolingFolder

_LAST = ("lasttoken",)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear map in fp32, and the activation after it."""

    weight: torch.Tensor
    """[size, input_size]"""
    bias: torch.Tensor | None
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(nn.functional.linear(x, self.weight, self.bias))


class Pooler:
    """The last part of a pooling model: pooling, linear maps, activation."""

    def __init__(
        self,
        folder: PoolingFolder,
        hidden_size: int,
        device: torch.device,
        types: tuple[str, ...],
        classifier: torch.Tensor | None = None,
    ) -> None:
        """``types``: the kinds of vectors computed from a prompt's rows, which are joined. ``classifier``:
        [num_classes, hidden_size]; None: there is none, or the rows are already logits."""
        self.types = types
        self._classifies = folder.classifies
        self._activates = folder.activates
        self._classifier = None if classifier is None else classifier.float().to(device)
        self._activation = _activation(folder.activation)
        self._dense = [_linear(each, device) for each in folder.dense]
        size = hidden_size * len(types)
        for linear in self._dense:
            if linear.weight.shape[1] != size:
                raise ModelLoadError(
                    f"A Dense module of {folder.folder} takes {linear.weight.shape[1]} numbers, and gets "
                    f"{size}."
                )
            size = linear.weight.shape[0]
        self.size = size if self._classifier is None else len(self._classifier)
        """The length of embeddings, or the number of classes."""

    def needs_all(self, params: PoolingParams) -> bool:
        """Whether it needs the rows of all tokens of a prompt, or only that of the last one."""
        return params.task in WHOLE_PROMPT_TASKS or self.types != _LAST

    def pool(self, rows: torch.Tensor, params: PoolingParams) -> Pooled:
        """rows [num_tokens, hidden_size], after the final norm -> the answer"""
        rows = rows.float()
        each = params.task in WHOLE_PROMPT_TASKS
        x = rows if each else torch.cat([_POOLED[name](rows) for name in self.types])
        return self.activated(x if self._classifier is None else x @ self._classifier.T, params)

    def activated(self, x: torch.Tensor, params: PoolingParams) -> Pooled:
        """x [..., size before the linear maps], or logits -> the answer"""
        activates = self._activates if params.use_activation is None else params.use_activation
        if self._classifies:
            x = self._activation(x) if activates else x
        else:
            for linear in self._dense:
                x = linear(x)
            x = x[..., : params.dimensions]
            x = nn.functional.normalize(x, dim=-1) if activates else x
        return Pooled.of(x.cpu().numpy())


def _weighted_mean(rows: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, len(rows) + 1, dtype=rows.dtype, device=rows.device)
    return weights @ rows / weights.sum()


_POOLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda rows: rows[0],
    "max": lambda rows: rows.amax(dim=0),
    "mean": lambda rows: rows.mean(dim=0),
    "mean_sqrt_len_tokens": lambda rows: rows.sum(dim=0) / len(rows) ** 0.5,
    "weightedmean": _weighted_mean,
    "lasttoken": lambda rows: rows[-1],
}
"""Pooling functions by name: rows [num_tokens, hidden_size] -> [hidden_size], like sentence-transformers'."""


def _activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    assert name in ACTIVATIONS, "the folder was read"
    if name == "Softmax":
        return nn.Softmax(dim=-1)
    made: nn.Module = getattr(nn, name)()
    return made


def _linear(dense: DenseFolder, device: torch.device) -> Linear:
    file = dense.path / "model.safetensors"
    if not file.is_file():
        raise ModelLoadError(f"{file} is missing; weights in other formats are not read.")
    tensors = load_file(file)
    names = ("linear.weight", *(("linear.bias",) if dense.has_bias else ()))
    for name in names:
        if name not in tensors:
            raise ModelLoadError(f"{file} has no tensor {name}.")
    weight = tensors["linear.weight"].float().to(device)
    bias = tensors["linear.bias"].float().to(device) if dense.has_bias else None
    return Linear(weight, bias, _activation(dense.activation))

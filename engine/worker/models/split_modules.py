"""Splits a model of transformers among tensor-parallel ranks, by the plan that its config brings. Knows no
architecture."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.errors import ConfigError
from engine.worker.parallel.group import TensorParallelGroup
from engine.worker.parallel.linears import RowParallelLinear

_WHOLE = frozenset(
    (
        *("colwise_gather_output", "rowwise_split_input", "replicated_with_grad_allreduce", "local_params"),
        *("mla_kv_a_proj", "replicate", "sequence_parallel"),
    )
)
"""Styles of modules that each rank has all of here: their outputs, or inputs, are those of all ranks."""


class SummedExperts(nn.Module):
    """A rank's parts of experts; it sums the ranks' outputs."""

    def __init__(self, partial: nn.Module, group: TensorParallelGroup) -> None:
        super().__init__()
        self.partial = partial
        self._group = group

    def forward(self, *arguments: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Like the experts."""
        return self._group.all_reduce(self.partial(*arguments, **named).contiguous())


def split_modules(model: PreTrainedModel, group: TensorParallelGroup) -> dict[str, str]:
    """Keep this rank's part of each module and parameter that the plan splits. Returns the paths of linears
    that were split, each with its style. ConfigError if the model has no plan, or one that is not known."""
    plan = _plan_of(model)
    split: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        style = _style_of(path, plan)
        if style is None or style in _WHOLE:
            continue
        if style == "moe_tp_experts":
            model.set_submodule(path, SummedExperts(module, group))
        elif isinstance(module, nn.Linear):
            _split_linear(model, path, module, style, group)
            split[path] = style
        else:
            raise _unknown(path, style)
    for path, parameter in list(model.named_parameters()):
        style = _style_of(path.replace(".partial.", "."), plan)
        if style is not None and style not in _WHOLE:
            parameter.data = _part_of(parameter.data, path, style, group)
    return split


def _plan_of(model: PreTrainedModel) -> dict[str, str]:
    plan: Any = getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise ConfigError("tensor_parallel_size > 1: transformers has no plan to split this model.")
    return dict(plan)


def _style_of(path: str, plan: dict[str, str]) -> str | None:
    """The style of a module or parameter; paths in a plan begin with the layers."""
    inner = path[path.find("layers.") :]
    return plan.get(re.sub(r"\.\d+\.", ".*.", inner, count=1))


def _split_linear(
    model: PreTrainedModel, path: str, plain: nn.Linear, style: str, group: TensorParallelGroup
) -> None:
    if style == "colwise":
        plain.weight.data = _chunk(plain.weight.data, 0, path, group)
        plain.out_features = len(plain.weight)
        if plain.bias is not None:
            plain.bias.data = _chunk(plain.bias.data, 0, path, group)
    elif style == "rowwise":
        bias = plain.bias
        plain.register_parameter("bias", None)
        plain.weight.data = _chunk(plain.weight.data, 1, path, group)
        plain.in_features = plain.weight.shape[1]
        model.set_submodule(path, RowParallelLinear(plain, bias, group))
    else:
        raise _unknown(path, style)


def _part_of(tensor: torch.Tensor, path: str, style: str, group: TensorParallelGroup) -> torch.Tensor:
    """This rank's part of a parameter by itself: of experts, one after another, or of sinks."""
    if style == "packed_colwise" and tensor.dim() == 3:
        halves = [_chunk(half, 1, path, group) for half in tensor.chunk(2, dim=1)]
        return torch.cat(halves, dim=1)
    if style == "rowwise" and tensor.dim() == 3:
        return _chunk(tensor, 2, path, group)
    if style == "colwise" and tensor.dim() == 1:
        return _chunk(tensor, 0, path, group)
    raise _unknown(path, style)


def _chunk(tensor: torch.Tensor, dim: int, path: str, group: TensorParallelGroup) -> torch.Tensor:
    if tensor.shape[dim] % group.size:
        raise ConfigError(
            f"tensor_parallel_size is {group.size}, which does not divide the {tensor.shape[dim]} outputs or "
            f"inputs of {path}."
        )
    return tensor.chunk(group.size, dim)[group.rank].clone()


def _unknown(path: str, style: str) -> ConfigError:
    return ConfigError(f"tensor_parallel_size > 1: {path} is split by {style}, which is not known here.")

"""Native models that fused ops do not support: their steps run layer by layer, and no call makes the host
wait, so that a CUDA graph can capture a step."""

from __future__ import annotations

import torch
from torch import nn

from engine.worker.gpu.fused_decoder import can_be_fused
from engine.worker.gpu.ops import FusedOps
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.models.moe import Experts, MixtureOfExperts


class GroupedExperts(nn.Module):
    """Experts in one grouped GEMM instead of one GEMM per chosen expert, which needs the choice on the
    host."""

    def __init__(self, experts: Experts, ops: FusedOps) -> None:
        super().__init__()
        self._experts = experts
        self._ops = ops

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See ``Experts``."""
        return self._ops.mix_experts(x.contiguous(), self._experts, experts, weights)


def group_experts(model: CausalModel, ops: FusedOps) -> None:
    """Replace the experts of a model that runs layer by layer; leave other models as they are."""
    if not isinstance(model, Decoder) or can_be_fused(model):
        return
    for mixture in _mixtures(model):
        if isinstance(mixture.experts, Experts) and ops.can_mix(mixture.experts):
            mixture.experts = GroupedExperts(mixture.experts, ops)


def never_waits(model: CausalModel) -> bool:
    """Whether no step makes the host wait, nor depends on how long sequences are. Steps of transformers'
    models and of models with states may wait; those with an indexer choose from longer sequences only."""
    if not isinstance(model, Decoder) or any(model.shape.states) or model.shape.indexes:
        return False
    return can_be_fused(model) or all(isinstance(each.experts, GroupedExperts) for each in _mixtures(model))


def _mixtures(model: Decoder) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]

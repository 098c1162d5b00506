"""Records which experts a decoder's routers choose. Costs nothing without a recorder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from engine.config.engine_config import ModelConfig
from engine.errors import ConfigError
from engine.records.kv_cache_groups import KVCacheGroup
from engine.records.routed_experts import ExpertArray, RoutedExpertsSpec, StepRouting
from engine.worker.attention.backend import IntArray
from engine.worker.models.base import CausalModel
from engine.worker.models.decoder import Decoder
from engine.worker.models.dense_and_sparse import DenseAndSparse
from engine.worker.models.moe import MixtureOfExperts
from engine.worker.models.shape import PairShape, SparseShape


def choose_routed_experts(
    config: ModelConfig, model: CausalModel, groups: Sequence[KVCacheGroup]
) -> RoutedExpertsSpec | None:
    """The sizes of the experts that ``enable_return_routed_experts`` returns; None without it. ConfigError if
    no layer keeps its KV blocks until a request ends."""
    if not config.enable_return_routed_experts:
        return None
    assert isinstance(model, Decoder), "the loader refuses others"
    if not groups[0].is_full:
        raise ConfigError(
            "enable_return_routed_experts needs the KV of all tokens, but all layers of this model have a "
            "sliding window: set disable_hybrid_kv_cache_manager, too."
        )
    return _spec(model)


def _spec(model: Decoder) -> RoutedExpertsSpec:
    """The sizes of the choices of a mixture of experts."""
    mlps = [mlp.sparse if isinstance(mlp, PairShape) else mlp for mlp in model.shape.mlps]
    routings = [mlp.routing for mlp in mlps if isinstance(mlp, SparseShape)]
    return RoutedExpertsSpec(
        num_layers=model.num_layers,
        experts_per_token=max(routing.experts_per_token for routing in routings),
        num_experts=max(routing.num_experts for routing in routings),
    )


class RoutingRecorder:
    """Records the experts of the running step's tokens."""

    def __init__(self, model: Decoder, max_num_tokens: int) -> None:
        """Replace the routers of ``model``, whose steps have at most ``max_num_tokens`` tokens. On a CPU."""
        spec = _spec(model)
        self._experts = spec.empty(max_num_tokens)
        # Signed, as torch has few unsigned types: numbers that are too large keep their bits.
        signed = torch.from_numpy(self._experts.view(_SIGNED[spec.dtype.itemsize]))
        for index, layer in enumerate(model.layers):
            mlp = getattr(layer, "mlp", None)
            if isinstance(mlp, DenseAndSparse):
                mlp = mlp.sparse
            if isinstance(mlp, MixtureOfExperts):
                mlp.add_module("router", RecordingRouter(mlp.router, signed[:, index]))

    def take(self, slots: IntArray) -> StepRouting:
        """The experts chosen in the step whose tokens have these slots [num_tokens]."""
        experts: ExpertArray = self._experts[: len(slots)].copy()
        return StepRouting(slots, experts)


class RecordingRouter(nn.Module):
    """A Router that records its choices."""

    def __init__(self, router: nn.Module, chosen: torch.Tensor) -> None:
        """chosen [max_num_tokens, experts_per_token]"""
        super().__init__()
        self._router = router
        self._chosen = chosen

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Router.forward``."""
        experts, weights = self._router(x)
        self._chosen[: len(experts)] = experts
        return experts, weights


_SIGNED = {1: np.int8, 2: np.int16}

"""A dense MLP and a mixture of experts beside it, which read and give the same hidden states, each with norms
of its own (Gemma 4)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear, rms_norm

from engine.worker.loading.tensor_part import TensorPart
from engine.worker.models.builder import Builder
from engine.worker.models.mlp import GatedMLP
from engine.worker.models.moe import MixtureOfExperts
from engine.worker.models.norms import normed
from engine.worker.models.routing import Router, by_softmax
from engine.worker.models.shape import DecoderShape, PairShape, Routing


class ScaledRouter(Router):
    """A softmax router that reads its input normalized and scaled, and scales each expert's weight."""

    def __init__(self, hidden_size: int, routing: Routing, eps: float, build: Builder) -> None:
        super().__init__(hidden_size, routing, build)
        self._eps = eps
        self.input_scale = build.parameter(hidden_size)
        self.expert_scale = build.parameter(routing.num_experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Router."""
        scaled = rms_norm(x, x.shape[1:], eps=self._eps) * self.input_scale * x.shape[1] ** -0.5
        experts, weights = by_softmax(linear(scaled, self.weight), self.routing)
        return experts, weights * self.expert_scale[experts]

    def checkpoint_parts(self) -> dict[str, TensorPart]:
        """See Router."""
        return {
            "proj.weight": TensorPart(self.weight),
            "scale": TensorPart(self.input_scale),
            "per_expert_scale": TensorPart(self.expert_scale),
        }


class NormedMixture(MixtureOfExperts):
    """A mixture whose experts read their input normalized, unlike its router."""

    def __init__(self, shape: DecoderShape, pair: PairShape, build: Builder) -> None:
        super().__init__(shape.hidden_size, pair.sparse, build)
        self._shape = shape
        self.router = ScaledRouter(shape.hidden_size, pair.sparse.routing, shape.norm_eps, build)
        self.norm = build.parameter(shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See MixtureOfExperts; x is not normalized."""
        return self.mixed_by(self._mix_normed, x)

    def _mix_normed(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.experts(normed(x, self.norm, self._shape), experts, weights)
        return output


class DenseAndSparse(nn.Module):
    """The two MLPs of one layer, or a rank's part of them. It normalizes its input itself."""

    def __init__(self, shape: DecoderShape, pair: PairShape, build: Builder) -> None:
        super().__init__()
        self._shape = shape
        size = shape.hidden_size
        self.dense = GatedMLP(size, pair.dense, build)
        self.sparse = NormedMixture(shape, pair, build)
        self.dense_norm = build.parameter(size)
        self.dense_output_norm = build.parameter(size)
        self.sparse_output_norm = build.parameter(size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size] -> the same shape"""
        shape = self._shape
        dense = self.dense(normed(x, self.dense_norm, shape))
        sparse = self.sparse(x)
        return normed(dense, self.dense_output_norm, shape) + normed(sparse, self.sparse_output_norm, shape)

    def checkpoint_parts(self, *, fused: bool) -> dict[str, TensorPart]:
        """The checkpoint's tensor names within a layer, each with its part and the parameter that it
        fills."""
        dense = self.dense.checkpoint_parts()
        norms = {
            "pre_feedforward_layernorm": self.dense_norm,
            "post_feedforward_layernorm_1": self.dense_output_norm,
            "pre_feedforward_layernorm_2": self.sparse.norm,
            "post_feedforward_layernorm_2": self.sparse_output_norm,
        }
        parts = {f"mlp.{name}": part for name, part in dense.items()}
        parts |= {f"{name}.weight": TensorPart(norm) for name, norm in norms.items()}
        return parts | self.sparse.checkpoint_parts(fused=fused)

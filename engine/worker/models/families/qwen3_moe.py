"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-Coder): Qwen3 with a mixture of experts in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.worker.models.families.qwen3 import qwen3_shape
from engine.worker.models.shape import DecoderShape, MLPs, Routing, SparseShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def qwen3_moe_shape(config: PreTrainedConfig) -> DecoderShape:
    plain = qwen3_shape(config)
    sparse = SparseShape(config.moe_intermediate_size, softmax_routing(config))
    return replace(plain, mlps=experts_of_layers(config, plain.mlps, sparse))


def softmax_routing(config: Any) -> Routing:
    """Qwen's router."""
    return Routing(
        config.num_experts,
        config.num_experts_per_tok,
        normalized=bool(getattr(config, "norm_topk_prob", True)),
        rounded=True,
    )


def experts_of_layers(config: Any, dense: MLPs, sparse: SparseShape) -> MLPs:
    """The MLP of each layer: experts in every ``decoder_sparse_step``-th, except in named ones."""
    named = getattr(config, "mlp_only_layers", None) or ()
    every = getattr(config, "decoder_sparse_step", 1)
    return tuple(mlp if index in named or (index + 1) % every else sparse for index, mlp in enumerate(dense))

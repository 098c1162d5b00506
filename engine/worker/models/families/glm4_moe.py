"""GLM-4.5, 4.6 and 4.7: a sigmoid router with a correction and groups, a shared expert, dense first layers,
and rope on a part of each head. The layers for multi-token prediction are not used."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.rotary import rope_parameters
from engine.worker.models.shape import DecoderShape, Routing, SparseShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def glm4_moe_shape(config: PreTrainedConfig) -> DecoderShape:
    plain = plain_shape(config)
    sparse = sigmoid_experts(config)
    share = rope_parameters(config).get("partial_rotary_factor", 1.0)
    mlps = (mlp if index < config.first_k_dense_replace else sparse for index, mlp in enumerate(plain.mlps))
    return replace(
        plain,
        qkv_bias=has_attention_bias(config),
        qk_norm=bool(config.use_qk_norm),
        rotary_dim=int(plain.head_dim * share),
        mlps=tuple(mlps),
        num_unused_layers=config.num_nextn_predict_layers,
    )


def sigmoid_experts(config: Any) -> SparseShape:
    """Experts chosen by a sigmoid router, and one for all tokens."""
    size = config.moe_intermediate_size
    return SparseShape(
        size, sigmoid_routing(config, config.n_routed_experts), size * (config.n_shared_experts or 0)
    )


def sigmoid_routing(config: Any, num_experts: int) -> Routing:
    """DeepSeek-V3's router: a correction affects the choice of experts but not their weights."""
    return Routing(
        num_experts,
        config.num_experts_per_tok,
        normalized=bool(config.norm_topk_prob),
        by_sigmoid=True,
        num_groups=config.n_group or 1,
        num_top_groups=config.topk_group or 1,
        scale=config.routed_scaling_factor,
    )

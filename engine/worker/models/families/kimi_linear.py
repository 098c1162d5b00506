"""Kimi Linear (arXiv:2510.26692): Kimi Delta Attention in most layers, latent attention without positions in
a few, and DeepSeek-V3's experts, under Mixtral's names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.deepseek_v2 import with_latents
from engine.worker.models.families.glm4_moe import sigmoid_routing
from engine.worker.models.families.mixtral import NAMES
from engine.worker.models.families.plain import mlps_by_kind, names_mlps, plain_shape
from engine.worker.models.mixers.state_shapes import KimiDeltaShape
from engine.worker.models.shape import NO_ROPE, DecoderShape, SparseShape

_KINDS = {"linear_attention", "full_attention"}


def is_known_kimi_linear(config: Any) -> bool:
    """Whether layers are of the known kinds, some attend, and the router is by sigmoid."""
    kinds = set(config.layer_types)
    by_sigmoid = getattr(config, "moe_router_activation_func", "sigmoid") == "sigmoid"
    has_all_heads = config.num_key_value_heads == config.num_attention_heads
    is_known = "full_attention" in kinds and kinds <= _KINDS and has_all_heads
    return names_mlps(config) and is_known and by_sigmoid


def kimi_linear_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    net = KimiDeltaShape(config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim)
    states = tuple(net if kind == "linear_attention" else None for kind in config.layer_types)
    size = config.moe_intermediate_size
    routing = sigmoid_routing(config, config.num_local_experts)
    sparse = SparseShape(size, routing, size * (config.n_shared_experts or 0), names=NAMES)
    return replace(
        with_latents(plain, config, interleaved=False),
        windows=(None,) * states.count(None),
        states=states,
        has_rope=False,
        rope_kinds=(NO_ROPE,) * plain.num_layers,
        mlps=mlps_by_kind(config, plain.mlps, sparse),
    )

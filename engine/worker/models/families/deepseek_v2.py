"""DeepSeek-V2 (arXiv:2405.04434): latent attention, a softmax router in fp32 that may first choose groups of
experts, shared experts, and dense first layers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.rotary import rope_parameters
from engine.worker.models.shape import DecoderShape, LatentShape, Routing, SparseShape

_TOPK_METHODS = ("greedy", "group_limited_greedy")


def is_known_deepseek_v2(config: Any) -> bool:
    """Whether the config requests only what transformers' own code computes from it."""
    return (
        _is_known(config)
        and config.topk_method in _TOPK_METHODS
        and not config.norm_topk_prob  # which its code does not read
        and not config.mlp_bias
        and getattr(config, "scoring_func", "softmax") == "softmax"
    )


def is_known_deepseek_v3(config: Any) -> bool:
    """The same for DeepSeek-V3."""
    is_known = getattr(config, "topk_method", "noaux_tc") == "noaux_tc"
    return _is_known(config) and is_known and getattr(config, "scoring_func", "sigmoid") == "sigmoid"


def _is_known(config: Any) -> bool:
    return (
        config.hidden_act == "silu"
        and config.num_key_value_heads == config.num_attention_heads
        and getattr(config, "moe_layer_freq", 1) == 1
    )


def deepseek_v2_shape(config: Any) -> DecoderShape:
    by_group = config.topk_method == "group_limited_greedy"
    routing = Routing(
        config.n_routed_experts,
        config.num_experts_per_tok,
        normalized=False,
        in_fp32=True,
        num_groups=config.n_group if by_group else 1,
        num_top_groups=config.topk_group if by_group else 1,
        scale=config.routed_scaling_factor,
    )
    return latent_decoder(config, routing, interleaved=True)


def latent_decoder(config: Any, routing: Routing, *, interleaved: bool) -> DecoderShape:
    """The shape of a decoder with latent attention and a mixture of experts after its first layers."""
    plain = with_latents(plain_shape(config), config, interleaved=interleaved)
    size = config.moe_intermediate_size
    sparse = SparseShape(size, routing, size * (config.n_shared_experts or 0))
    first = getattr(config, "first_k_dense_replace", 0) or 0
    mlps = tuple(mlp if index < first else sparse for index, mlp in enumerate(plain.mlps))
    return replace(plain, mlps=mlps, num_unused_layers=getattr(config, "num_nextn_predict_layers", None) or 0)


def with_latents(plain: DecoderShape, config: Any, *, interleaved: bool) -> DecoderShape:
    """The shape with latent attention in all layers."""
    latent = _latent_shape(config, interleaved)
    return replace(
        plain, num_kv_heads=1, head_dim=latent.latent_size, rotary_dim=latent.rope_dim, latent=latent
    )


def _latent_shape(config: Any, interleaved: bool) -> LatentShape:
    return LatentShape(
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        interleaved=interleaved,
        bias=has_attention_bias(config),
        stretch=_stretch(rope_parameters(config)),
    )


def _stretch(rope: dict[str, Any]) -> float:
    """The factor of scores with which YaRN sharpens attention over a longer context (arXiv:2309.00071,
    section 3.4); DeepSeek applies it here instead of to cosines and sines."""
    share = rope.get("mscale_all_dim", 0)
    factor = rope.get("factor") or 1.0
    if rope.get("rope_type", "default") == "default" or not share or factor <= 1:
        return 1.0
    return float((0.1 * share * math.log(factor) + 1.0) ** 2)

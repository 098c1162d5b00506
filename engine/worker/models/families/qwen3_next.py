"""Qwen3-Next and Qwen3.5 (text): a gated delta net in most layers, gated attention in every fourth, and a
mixture of experts with a gated shared one. The layers for multi-token prediction are not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.families.qwen3_moe import experts_of_layers, softmax_routing
from engine.worker.models.mixers.state_shapes import DeltaNetShape
from engine.worker.models.rotary import rope_parameters
from engine.worker.models.shape import DecoderShape, ExpertNames, MLPs, SparseShape

_NAMES = ExpertNames(shared="shared_expert")


def is_known_qwen3_next(config: Any) -> bool:
    """Whether all its layers are of the two supported kinds, and some of them attend."""
    kinds = set(config.layer_types)
    known = {"linear_attention", "full_attention"}
    return config.hidden_act == "silu" and "full_attention" in kinds and known >= kinds


def qwen3_next_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    biased = has_attention_bias(config)
    states = delta_nets(config, by_head=config.model_type == "qwen3_next")
    share = rope_parameters(config).get("partial_rotary_factor", 1.0)
    return replace(
        plain,
        windows=(None,) * states.count(None),
        states=states,
        mlps=_mlps(config, plain),
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        output_gate=True,
        centered_norms=True,
        rotary_dim=int(plain.head_dim * share),
    )


def delta_nets(config: Any, **more: Any) -> tuple[DeltaNetShape | None, ...]:
    """The delta net of each layer that has one. ``more``: what the family's differ in."""
    net = DeltaNetShape(
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
        config.linear_conv_kernel_dim,
        **more,
    )
    return tuple(net if kind == "linear_attention" else None for kind in config.layer_types)


def gated_share(config: Any) -> SparseShape:
    """Experts, and a shared one whose output is gated."""
    return SparseShape(
        config.moe_intermediate_size,
        softmax_routing(config),
        config.shared_expert_intermediate_size,
        gated_share=True,
        names=_NAMES,
    )


def _mlps(config: Any, plain: DecoderShape) -> MLPs:
    """Qwen3.5 has experts in all layers or in none, Qwen3-Next in those that its config names."""
    if not getattr(config, "num_experts", 0):
        return plain.mlps
    return experts_of_layers(config, plain.mlps, gated_share(config))

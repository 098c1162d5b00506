"""Hunyuan 3: Qwen3's attention, experts with a sigmoid router and a shared one in the layers that the config
names. The layers for multi-token prediction are not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.plain import has_attention_bias, mlps_by_kind, names_mlps, plain_shape
from engine.worker.models.shape import DecoderShape, Routing, SparseShape

_NAMES = (
    ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
    ("mlp.gate.weight", "mlp.router.gate.weight"),
    ("mlp.shared_experts.", "mlp.shared_mlp."),
)


def is_known_hy_v3(config: Any) -> bool:
    return names_mlps(config) and not config.mlp_bias


def hy_v3_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    biased = has_attention_bias(config)
    size = config.moe_intermediate_size
    routing = Routing(
        config.num_experts, config.num_experts_per_tok, by_sigmoid=True, scale=config.router_scaling_factor
    )
    sparse = SparseShape(size, routing, size * config.num_shared_experts)
    return replace(
        plain,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        mlps=mlps_by_kind(config, plain.mlps, sparse),
        other_names=_NAMES,
        num_unused_layers=getattr(config, "num_nextn_predict_layers", None) or 0,
    )

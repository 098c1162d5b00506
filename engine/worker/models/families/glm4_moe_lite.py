"""GLM-4.7-Flash: DeepSeek-V3's latent attention and router in GLM's decoder; the config names the layers with
experts. The layers for multi-token prediction are not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.deepseek_v2 import latent_decoder
from engine.worker.models.families.glm4_moe import sigmoid_routing
from engine.worker.models.families.plain import mlps_by_kind, names_mlps, plain_shape
from engine.worker.models.shape import DecoderShape


def is_known_glm4_moe_lite(config: Any) -> bool:
    has_all_heads: bool = config.num_key_value_heads == config.num_attention_heads
    return names_mlps(config) and has_all_heads


def glm4_moe_lite_shape(config: Any) -> DecoderShape:
    shape = latent_decoder(
        config, sigmoid_routing(config, config.n_routed_experts), interleaved=bool(config.rope_interleave)
    )
    dense = plain_shape(config).mlps
    return replace(shape, mlps=mlps_by_kind(config, dense, sparse=shape.mlps[-1]))

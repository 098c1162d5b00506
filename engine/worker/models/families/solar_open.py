"""Solar Open: Llama's attention, GLM-4.5's mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.glm4_moe import sigmoid_experts
from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import DecoderShape


def solar_open_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    mlps = (sigmoid_experts(config),) * plain.num_layers
    return replace(plain, qkv_bias=has_attention_bias(config), mlps=mlps)

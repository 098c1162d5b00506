"""Qwen1.5-MoE and Qwen2-57B-A14B: Qwen2 with a mixture of experts and a gated shared one in most layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.base import layer_windows
from engine.worker.models.families.plain import plain_shape
from engine.worker.models.families.qwen3_moe import experts_of_layers
from engine.worker.models.families.qwen3_next import gated_share
from engine.worker.models.shape import DecoderShape


def qwen2_moe_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    return replace(
        plain,
        qkv_bias=bool(config.qkv_bias),
        windows=tuple(layer_windows(config)),
        mlps=experts_of_layers(config, plain.mlps, gated_share(config)),
    )

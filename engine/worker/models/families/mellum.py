"""Mellum 2: Qwen3-MoE with windows in some layers, a rope for each kind of layer, and experts where the
config says so. The layers for multi-token prediction are not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.plain import mlps_by_kind
from engine.worker.models.families.qwen3 import qwen3_shape
from engine.worker.models.families.qwen3_moe import softmax_routing
from engine.worker.models.rotary import all_ropes
from engine.worker.models.shape import DecoderShape, SparseShape


def mellum_shape(config: Any) -> DecoderShape:
    plain = qwen3_shape(config)
    sparse = SparseShape(config.moe_intermediate_size, softmax_routing(config))
    return replace(
        plain,
        rope_kinds=() if "" in all_ropes(config) else tuple(config.layer_types),
        mlps=mlps_by_kind(config, plain.mlps, sparse),
    )

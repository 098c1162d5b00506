"""ERNIE 4.5's mixtures of experts: a softmax router in fp32, whose correction affects the choice of experts
but not their weights. The layers for multi-token prediction are not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.ernie4_5 import ernie4_5_shape
from engine.worker.models.shape import DecoderShape, MLPShape, Routing, SparseShape

_CORRECTION = "e_score_correction_bias"
_NAMES = ((f"mlp.gate.{_CORRECTION}", f"mlp.moe_statics.{_CORRECTION}"),)


def is_known_ernie4_5_moe(config: Any) -> bool:
    """Whether the config asks for SiLU and no biases, which the published models do not have."""
    return config.hidden_act == "silu" and not config.use_bias


def ernie4_5_moe_shape(config: Any) -> DecoderShape:
    plain = ernie4_5_shape(config)
    routing = Routing(
        config.moe_num_experts,
        config.moe_k,
        in_fp32=True,
        corrected=True,
        rounded=True,
        smallest_sum=config.moe_norm_min,
    )
    size = config.moe_intermediate_size
    sparse = SparseShape(size, routing, size * config.moe_num_shared_experts)
    mlps: tuple[MLPShape | None, ...] = tuple(
        sparse if _has_experts(config, index) else mlp for index, mlp in enumerate(plain.mlps)
    )
    return replace(plain, mlps=mlps, other_names=_NAMES)


def _has_experts(config: Any, index: int) -> bool:
    is_within: bool = config.moe_layer_start_index <= index <= config.moe_layer_end_index
    return is_within and (index + 1) % config.moe_layer_interval == 0

"""Cohere 2 (Command R7B, Command A): layer norms, MLPs beside attention, and positions only in layers with a
window."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.base import layer_windows
from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import NO_ROPE, DecoderShape


def cohere2_shape(config: Any) -> DecoderShape:
    biased = has_attention_bias(config)
    windows = tuple(layer_windows(config))
    return replace(
        plain_shape(config, "layer_norm_eps"),
        windows=windows,
        qkv_bias=biased,
        output_bias=biased,
        mean_norms=True,
        parallel_mlps=True,
        neighbor_rope=True,
        rope_kinds=tuple(NO_ROPE if window is None else "" for window in windows),
        logit_divisor=1 / config.logit_scale,
    )

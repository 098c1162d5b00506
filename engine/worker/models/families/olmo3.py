"""Olmo 3: outputs of attention and MLP are normalized instead of inputs, as are all queries and all keys;
windows in most layers, with a rope of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.base import layer_windows
from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.rotary import all_ropes
from engine.worker.models.shape import DecoderShape


def olmo3_shape(config: Any) -> DecoderShape:
    has_one_rope = "" in all_ropes(config)
    return replace(
        normed_attention(plain_shape(config), config),
        input_norms=False,
        output_norms=True,
        windows=tuple(layer_windows(config)),
        rope_kinds=() if has_one_rope else tuple(config.layer_types),
    )


def normed_attention(plain: DecoderShape, config: Any) -> DecoderShape:
    """With norms of all queries and of all keys, which are rotated in fp32."""
    biased = has_attention_bias(config)
    return replace(
        plain, qkv_bias=biased, output_bias=biased, qk_norm=True, norms_all_heads=True, wide_rope=True
    )

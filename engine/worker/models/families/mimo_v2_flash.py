"""MiMo-V2-Flash: windows and sinks in most layers, which have twice the key-value heads of the others; values
smaller than keys, rope on a third of each head, and GLM-4.5's experts. The layers for multi-token prediction
are not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.base import layer_windows
from engine.worker.models.families.glm4_moe import sigmoid_routing
from engine.worker.models.families.plain import has_attention_bias, mlps_by_kind, names_mlps, plain_shape
from engine.worker.models.rotary import all_ropes
from engine.worker.models.shape import DecoderShape, HeadShape, SparseShape

_KINDS = {"sliding_attention", "full_attention"}
_NAMES = (("self_attn.sinks", "self_attn.attention_sink_bias"),)
_SHARE = 0.334


def is_known_mimo_v2(config: Any) -> bool:
    """Whether all layers rotate the same part of each head, and values are no larger than keys."""
    shares = {rope.get("partial_rotary_factor", _SHARE) for rope in all_ropes(config).values()}
    is_known = set(config.layer_types) <= _KINDS and config.v_head_dim <= config.head_dim
    return names_mlps(config) and len(shares) == 1 and is_known


def mimo_v2_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    rope = all_ropes(config)[config.layer_types[0]]
    sparse = SparseShape(config.moe_intermediate_size, sigmoid_routing(config, config.n_routed_experts))
    return replace(
        plain,
        qkv_bias=has_attention_bias(config),
        windows=tuple(layer_windows(config)),
        layer_heads=tuple(_heads(plain, kind) for kind in config.layer_types),
        value_dim=config.v_head_dim,
        value_scale=1.0 if config.attention_value_scale is None else config.attention_value_scale,
        rotary_dim=int(plain.head_dim * rope.get("partial_rotary_factor", _SHARE)),
        rope_kinds=tuple(config.layer_types),
        mlps=mlps_by_kind(config, plain.mlps, sparse),
        other_names=_NAMES,
    )


def _heads(plain: DecoderShape, kind: str) -> HeadShape:
    has_window = kind == "sliding_attention"
    factor = 2 if has_window else 1
    return HeadShape(factor * plain.num_kv_heads, plain.head_dim, sinks=has_window)

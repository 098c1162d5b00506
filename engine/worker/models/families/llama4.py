"""Llama 4 (text): layers that attend to chunks and use rope, between layers that attend to everything and
have no positions; a mixture of experts with a shared one, in all layers or every other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import (
    NO_ROPE,
    DecoderShape,
    DenseShape,
    ExpertNames,
    MixedRope,
    QueryGrowth,
    Routing,
    SparseShape,
)

_PREFIX = "feed_forward."
_NAMES = ExpertNames(_PREFIX, router="router", shared="shared_expert", transposed=True)


def is_known_llama4(config: Any) -> bool:
    """Whether all its layers are of the two supported kinds."""
    kinds = {"full_attention"} | ({"chunked_attention"} if config.attention_chunk_size else set())
    return config.hidden_act == "silu" and kinds.issuperset(config.layer_types)


def llama4_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    biased = has_attention_bias(config)
    sparse = _sparse_shape(config)
    dense = DenseShape(config.intermediate_size_mlp)
    sparse_layers = frozenset(config.moe_layers)
    chunk = config.attention_chunk_size
    return replace(
        plain,
        qkv_bias=biased,
        output_bias=biased,
        chunks=tuple(chunk if kind == "chunked_attention" else None for kind in config.layer_types),
        # 1 means a layer with rope, despite the field's name.
        rope_kinds=tuple("" if has_rope else NO_ROPE for has_rope in config.no_rope_layers),
        mixed_rope=_mixed_rope(config),
        mlps=tuple(sparse if index in sparse_layers else dense for index in range(plain.num_layers)),
        mlp_prefix=_PREFIX,
    )


def _mixed_rope(config: Any) -> MixedRope:
    growth = config.attn_scale if config.attn_temperature_tuning else 0.0
    return MixedRope(bool(config.use_qk_norm), QueryGrowth(growth, config.floor_scale))


def _sparse_shape(config: Any) -> SparseShape:
    routing = Routing(config.num_local_experts, config.num_experts_per_tok, scales_input=True)
    return SparseShape(config.intermediate_size, routing, config.intermediate_size, _NAMES)

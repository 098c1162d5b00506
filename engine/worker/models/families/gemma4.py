"""Gemma 4 (text): Gemma 3 with normalized values, and a number in each layer. Layers with a window and those
without differ in their heads and ropes; the latter may take their values from their keys. The small models
have embeddings for each layer, and last layers that attend to the keys and values of others; one has experts
beside its MLPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.base import layer_windows
from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import (
    DecoderShape,
    DenseShape,
    ExpertNames,
    HeadShape,
    LayerInputShape,
    MLPShape,
    PairShape,
    Routing,
    SparseShape,
)

_KINDS = {"sliding_attention", "full_attention"}


def is_known_gemma4(config: Any) -> bool:
    """Whether text attends to what is before it, and the activation is the supported one."""
    return (
        config.hidden_activation == "gelu_pytorch_tanh"
        and config.use_bidirectional_attention != "all"
        and set(config.layer_types) <= _KINDS
    )


def gemma4_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config.per_layer_config[0])
    biased = has_attention_bias(config)
    kv_of = _kv_of(config)
    windows = layer_windows(config)
    own = [layer for layer, mode in enumerate(config.kv_sharing_modes) if mode != "reuse"]
    size = config.hidden_size_per_layer_input
    inputs = (
        LayerInputShape(config.vocab_size_per_layer_input, size, config.pad_token_id or 0) if size else None
    )
    return replace(
        plain,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        unit_values=True,
        windows=tuple(windows[layer] for layer in own),
        kv_of=kv_of,
        layer_heads=tuple(_heads(config, layer) for layer in range(plain.num_layers)),
        mlps=tuple(_mlp(config, mode == "reuse") for mode in config.kv_sharing_modes),
        attention_scale=1.0,
        logit_cap=config.final_logit_softcapping,
        output_norms=True,
        embedding_scale=config.hidden_size**0.5,
        rope_kinds=tuple(config.layer_types),
        layer_scalars=True,
        layer_inputs=inputs,
    )


def _heads(config: Any, layer: int) -> HeadShape:
    of_layer = config.per_layer_config[layer]
    is_full = config.layer_types[layer] == "full_attention"
    keys_are_values = bool(config.attention_k_eq_v and is_full)
    return HeadShape(of_layer.num_key_value_heads, of_layer.head_dim, keys_are_values)


def _kv_of(config: Any) -> tuple[int, ...]:
    """See ``DecoderShape.kv_of``: layers that reuse attend to what the last one of their type has stored."""
    if not config.num_kv_shared_layers:
        return ()
    numbers: list[int] = []
    stored: dict[str, int] = {}
    num_own = 0
    for kind, mode in zip(config.layer_types, config.kv_sharing_modes, strict=True):
        if mode == "reuse":
            numbers.append(stored[kind])
            continue
        stored[kind] = num_own
        numbers.append(num_own)
        num_own += 1
    return tuple(numbers)


def _mlp(config: Any, reuses: bool) -> MLPShape:
    factor = 2 if config.use_double_wide_mlp and reuses else 1
    dense = DenseShape(factor * config.intermediate_size, by_gelu=True)
    if not config.enable_moe_block:
        return dense
    routing = Routing(config.num_experts, config.top_k_experts)
    names = ExpertNames("", router="router")
    sparse = SparseShape(config.moe_intermediate_size, routing, names=names, by_gelu=True)
    return PairShape(dense, sparse)

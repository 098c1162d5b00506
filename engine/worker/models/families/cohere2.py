"""Cohere 2 (Command R7B, Command A): layer norms, MLPs beside attention, and positions only in layers with a
window."""

from __future__ import annotations

from typing import Any

from engine.worker.models.base import layer_windows
from engine.worker.models.families.plain import has_attention_bias
from engine.worker.models.shape import NO_ROPE, DecoderShape, DenseShape


def cohere2_shape(config: Any) -> DecoderShape:
    biased = has_attention_bias(config)
    windows = tuple(layer_windows(config))
    return DecoderShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        norm_eps=config.layer_norm_eps,
        tied=bool(config.tie_word_embeddings),
        windows=windows,
        mlps=(DenseShape(config.intermediate_size),) * config.num_hidden_layers,
        qkv_bias=biased,
        output_bias=biased,
        mean_norms=True,
        parallel_mlps=True,
        neighbor_rope=True,
        rope_kinds=tuple(NO_ROPE if window is None else "" for window in windows),
        logit_divisor=1 / config.logit_scale,
    )

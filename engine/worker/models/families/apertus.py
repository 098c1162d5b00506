"""Apertus: Qwen3 with xIELU in place of a gate, and names of its own for norms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import DecoderShape, DenseShape

_NAMES = (
    ("input_layernorm.", "attention_layernorm."),
    ("post_attention_layernorm.", "feedforward_layernorm."),
)


def is_known_apertus(config: Any) -> bool:
    return bool(config.hidden_act == "xielu")


def apertus_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    biased = has_attention_bias(config)
    mlp = DenseShape(config.intermediate_size, by_xielu=True)
    return replace(
        plain,
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        mlps=(mlp,) * plain.num_layers,
        other_names=_NAMES,
    )

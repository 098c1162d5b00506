"""ERNIE 4.5: Llama with a rope that rotates neighbors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.plain import plain_shape
from engine.worker.models.shape import DecoderShape, DenseShape


def ernie4_5_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    biased = bool(config.use_bias)
    mlp = DenseShape(config.intermediate_size, bias=biased)
    return replace(
        plain,
        qkv_bias=biased,
        output_bias=biased,
        neighbor_rope=True,
        wide_rope=True,
        mlps=(mlp,) * plain.num_layers,
    )

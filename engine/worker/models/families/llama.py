"""Llama 2 and 3: biases if the config says so. They have no windows, whatever the config contains."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import DecoderShape, DenseShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def llama_shape(config: PreTrainedConfig) -> DecoderShape:
    plain = plain_shape(config)
    biased = has_attention_bias(config)
    mlp = DenseShape(config.intermediate_size, bias=bool(getattr(config, "mlp_bias", False)))
    return replace(plain, qkv_bias=biased, output_bias=biased, mlps=(mlp,) * plain.num_layers)

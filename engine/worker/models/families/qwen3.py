"""Qwen3: a norm for each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from engine.worker.models.base import layer_windows
from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import DecoderShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def qwen3_shape(config: PreTrainedConfig) -> DecoderShape:
    biased = has_attention_bias(config)
    return replace(
        plain_shape(config),
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        windows=tuple(layer_windows(config)),
    )

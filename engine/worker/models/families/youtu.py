"""Youtu-LLM: DeepSeek-V3's latent attention in a dense decoder."""

from __future__ import annotations

from typing import Any

from engine.worker.models.families.deepseek_v2 import with_latents
from engine.worker.models.families.plain import plain_shape
from engine.worker.models.shape import DecoderShape


def is_known_youtu(config: Any) -> bool:
    return bool(config.hidden_act == "silu" and config.num_key_value_heads == config.num_attention_heads)


def youtu_shape(config: Any) -> DecoderShape:
    return with_latents(plain_shape(config), config, interleaved=bool(config.rope_interleave))

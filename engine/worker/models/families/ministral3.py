"""Ministral 3: Mistral, with queries that grow beyond the context of its first training."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.mistral import mistral_shape
from engine.worker.models.rotary import rope_parameters
from engine.worker.models.shape import DecoderShape, QueryGrowth


def is_known_ministral3(config: Any) -> bool:
    return config.hidden_act == "silu" and names_growth(config)


def ministral3_shape(config: Any) -> DecoderShape:
    return replace(mistral_shape(config), query_growth=query_growth(config))


def names_growth(config: Any) -> bool:
    """Whether the rope's parameters say how queries grow."""
    rope = rope_parameters(config)
    interval = rope.get("original_max_position_embeddings") or 0
    return rope.get("llama_4_scaling_beta") is not None and interval > 0


def query_growth(config: Any) -> QueryGrowth:
    rope = rope_parameters(config)
    return QueryGrowth(rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])

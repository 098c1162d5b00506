"""Mistral Small 4: DeepSeek's latent attention with Ministral's growing queries, and a softmax router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.deepseek_v2 import latent_decoder
from engine.worker.models.families.ministral3 import names_growth, query_growth
from engine.worker.models.shape import DecoderShape, Routing


def is_known_mistral4(config: Any) -> bool:
    """Whether all heads have keys of their own, experts are not grouped, and queries grow as known."""
    has_all_heads = config.num_key_value_heads == config.num_attention_heads
    is_grouped = (config.n_group or 1) > 1
    return config.hidden_act == "silu" and has_all_heads and not is_grouped and names_growth(config)


def mistral4_shape(config: Any) -> DecoderShape:
    routing = Routing(
        config.n_routed_experts,
        config.num_experts_per_tok,
        normalized=bool(config.norm_topk_prob),
        rounded=True,
        scale=config.routed_scaling_factor,
    )
    shape = latent_decoder(config, routing, interleaved=bool(config.rope_interleave))
    return replace(shape, query_growth=query_growth(config))

"""DeepSeek-V3 (arXiv:2412.19437) and R1, and Kimi-K2: DeepSeek-V2 with a sigmoid router, whose correction
affects the choice of experts but not their weights. The layers for multi-token prediction are not used."""

from __future__ import annotations

from typing import Any

from engine.worker.models.families.deepseek_v2 import latent_decoder
from engine.worker.models.shape import DecoderShape, Routing


def deepseek_v3_shape(config: Any) -> DecoderShape:
    routing = Routing(
        config.n_routed_experts,
        config.num_experts_per_tok,
        normalized=bool(config.norm_topk_prob),
        by_sigmoid=True,
        num_groups=config.n_group or 1,
        num_top_groups=config.topk_group or 1,
        scale=config.routed_scaling_factor,
    )
    return latent_decoder(config, routing, interleaved=bool(config.rope_interleave))

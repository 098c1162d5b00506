"""DeepSeek-V3 (arXiv:2412.19437) and R1, and Kimi-K2: DeepSeek-V2 with a sigmoid router, whose correction
affects the choice of experts but not their weights. The layers for multi-token prediction are not used."""

from __future__ import annotations

from typing import Any

from engine.worker.models.families.deepseek_v2 import latent_decoder
from engine.worker.models.families.glm4_moe import sigmoid_routing
from engine.worker.models.shape import DecoderShape


def deepseek_v3_shape(config: Any) -> DecoderShape:
    return latent_decoder(
        config, sigmoid_routing(config, config.n_routed_experts), interleaved=bool(config.rope_interleave)
    )

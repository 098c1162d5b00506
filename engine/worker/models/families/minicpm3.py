"""MiniCPM3: DeepSeek's latent attention in a dense decoder, with factors of embeddings,
residuals and logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.worker.models.families.deepseek_v2 import with_latents
from engine.worker.models.families.plain import plain_shape
from engine.worker.models.shape import DecoderShape


def is_known_minicpm3(config: Any) -> bool:
    return bool(config.hidden_act == "silu" and not config.mlp_bias)


def minicpm3_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    return replace(
        with_latents(plain, config, interleaved=False),
        embedding_scale=float(config.scale_emb),
        residual_scale=config.scale_depth / math.sqrt(plain.num_layers),
        logit_divisor=config.logits_scaling,
    )

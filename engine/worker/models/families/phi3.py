"""Phi-3 (4k) and Phi-4: Mistral, with queries, keys and values in one tensor of checkpoints, and gates and
ups. Those with longrope are left to transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.mistral import mistral_shape
from engine.worker.models.rotary import rope_parameters
from engine.worker.models.shape import DecoderShape, DenseShape


def phi3_shape(config: Any) -> DecoderShape:
    plain = mistral_shape(config)
    share = rope_parameters(config).get("partial_rotary_factor", 1.0)
    mlp = DenseShape(config.intermediate_size, joined=True)
    return replace(
        plain,
        joined_qkv=True,
        rotary_dim=int(plain.head_dim * share) if share < 1 else 0,
        mlps=(mlp,) * plain.num_layers,
    )

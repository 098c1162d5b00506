"""GLM-4-0414: a rope that rotates neighbors in a part of each head, and norms of the outputs of attention and
MLP in addition to those of their inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.rotary import rope_parameters
from engine.worker.models.shape import DecoderShape, DenseShape

_OTHER_NAMES = (
    ("post_attention_layernorm.", "post_self_attn_layernorm."),
    ("pre_feedforward_layernorm.", "post_attention_layernorm."),
    ("post_feedforward_layernorm.", "post_mlp_layernorm."),
)


def glm4_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    share = rope_parameters(config).get("partial_rotary_factor", 1.0)
    return replace(
        plain,
        qkv_bias=has_attention_bias(config),
        output_norms=True,
        neighbor_rope=True,
        rotary_dim=int(plain.head_dim * share),
        mlps=(DenseShape(config.intermediate_size, joined=True),) * plain.num_layers,
        other_names=_OTHER_NAMES,
    )

"""Bamba: Mamba-2 in most layers, attention with a rope on half of each head in a few, and an MLP in each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.granitemoehybrid import mamba_shape, scans_every_step
from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.rotary import rope_parameters
from engine.worker.models.shape import DecoderShape, DenseShape

NAMES = (("post_attention_layernorm.", "pre_ff_layernorm."), ("mlp.", "feed_forward."))


def is_known_bamba(config: Any) -> bool:
    """Whether some layers attend, and nothing bounds the time steps."""
    attends = "full_attention" in config.layers_block_type
    return config.hidden_act == "silu" and attends and scans_every_step(config)


def bamba_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    biased = has_attention_bias(config)
    mamba = mamba_shape(config)
    states = tuple(mamba if kind == "linear_attention" else None for kind in config.layers_block_type)
    share = rope_parameters(config).get("partial_rotary_factor", 1.0)
    return replace(
        plain,
        windows=(None,) * states.count(None),
        states=states,
        mlps=(DenseShape(config.intermediate_size, bias=bool(config.mlp_bias)),) * plain.num_layers,
        qkv_bias=biased,
        output_bias=biased,
        rotary_dim=int(plain.head_dim * share),
        other_names=NAMES,
    )

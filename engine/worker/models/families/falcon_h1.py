"""Falcon-H1: attention and Mamba-2 side by side in each layer, an MLP, and factors of nearly everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.bamba import NAMES
from engine.worker.models.families.granitemoehybrid import mamba_shape, scans_every_step
from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import BesideShape, DecoderShape, DenseShape


def is_known_falcon_h1(config: Any) -> bool:
    """Whether nothing bounds the time steps, and norms and biases of Mamba layers are as elsewhere."""
    is_gated_first = not (config.mamba_rms_norm and config.mamba_norm_before_gate)
    has_one_bias = bool(config.mamba_proj_bias) == bool(config.projectors_bias)
    return config.hidden_act == "silu" and scans_every_step(config) and is_gated_first and has_one_bias


def falcon_h1_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    biased = has_attention_bias(config)
    mamba = replace(
        mamba_shape(config), has_norm=bool(config.mamba_rms_norm), scales=tuple(config.ssm_multipliers)
    )
    gate_scale, output_scale = config.mlp_multipliers
    mlp = DenseShape(
        config.intermediate_size,
        bias=bool(config.mlp_bias),
        gate_scale=gate_scale,
        output_scale=output_scale,
    )
    beside = BesideShape(
        attention_input=config.attention_in_multiplier,
        attention_output=config.attention_out_multiplier,
        state_input=config.ssm_in_multiplier,
        state_output=config.ssm_out_multiplier,
    )
    return replace(
        plain,
        states=(mamba,) * plain.num_layers,
        beside=beside,
        mlps=(mlp,) * plain.num_layers,
        qkv_bias=biased,
        output_bias=biased,
        attention_scale=config.key_multiplier * plain.head_dim**-0.5,
        embedding_scale=config.embedding_multiplier,
        logit_divisor=1 / config.lm_head_multiplier,
        other_names=NAMES,
    )

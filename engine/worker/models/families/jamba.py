"""Jamba: Mamba in most layers, attention without positions in a few, and experts in every other layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.bamba import NAMES
from engine.worker.models.families.plain import plain_shape
from engine.worker.models.mixers.state_shapes import Mamba1Shape
from engine.worker.models.shape import NO_ROPE, DecoderShape, ExpertNames, Routing, SparseShape

_EXPERT_NAMES = ExpertNames("feed_forward.", router="router")


def is_known_jamba(config: Any) -> bool:
    """Whether some of its layers attend, and some have a state."""
    return config.hidden_act == "silu" and set(config.layers_block_type) == {"attention", "mamba"}


def jamba_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    mamba = Mamba1Shape(
        num_channels=config.mamba_expand * config.hidden_size,
        state_size=config.mamba_d_state,
        step_rank=config.mamba_dt_rank,
        conv_width=config.mamba_d_conv,
        conv_bias=bool(config.mamba_conv_bias),
        bias=bool(config.mamba_proj_bias),
    )
    states = tuple(mamba if kind == "mamba" else None for kind in config.layers_block_type)
    routing = Routing(config.num_experts, config.num_experts_per_tok, normalized=False, rounded=True)
    sparse = SparseShape(config.intermediate_size, routing, names=_EXPERT_NAMES)
    numbers = zip(config.layers_num_experts, plain.mlps, strict=True)
    return replace(
        plain,
        windows=(None,) * states.count(None),
        states=states,
        has_rope=False,
        rope_kinds=(NO_ROPE,) * plain.num_layers,
        mlps=tuple(sparse if number > 1 else mlp for number, mlp in numbers),
        other_names=NAMES,
    )

"""Olmo Hybrid: a gated delta net in most layers, whose inputs are normalized, and Olmo 3's attention in every
fourth, without windows and in published models without positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.olmo3 import normed_attention
from engine.worker.models.families.plain import plain_shape
from engine.worker.models.families.qwen3_next import delta_nets
from engine.worker.models.rotary import rope_parameters
from engine.worker.models.shape import NO_ROPE, DecoderShape

_OUTPUT_EPS = 1e-5
"""The epsilon of the norm of a delta net's outputs, whatever the config's is."""


def olmo_hybrid_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    states = delta_nets(
        config,
        by_head=False,
        separate=True,
        rate_scale=2.0 if config.linear_allow_neg_eigval else 1.0,
        norm_eps=_OUTPUT_EPS,
    )
    has_rope = rope_parameters(config).get("rope_theta") is not None
    return replace(
        normed_attention(plain, config),
        windows=(None,) * states.count(None),
        states=states,
        output_normed=tuple(state is None for state in states),
        has_rope=has_rope,
        rope_kinds=() if has_rope else (NO_ROPE,) * plain.num_layers,
    )

"""Granite 4: Mamba-2 in most layers and attention without positions in a few, an MLP for all tokens in
addition to the experts, if there are any, and factors of embeddings, residuals, scores and logits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.worker.models.families.granite import NAMES, chosen_softmax, scaled_shape
from engine.worker.models.mixers.state_shapes import MambaShape
from engine.worker.models.shape import DecoderShape, DenseShape, ExpertNames, MLPShape, SparseShape

_EVERY_STEP = (0.0, math.inf)
_EXPERT_NAMES = ExpertNames(joined_share=True)
_OTHER_NAMES = (
    *NAMES,
    ("mlp.gate_up_proj.", "shared_mlp.input_linear."),
    ("mlp.down_proj.", "shared_mlp.output_linear."),
)


def is_known_granite_hybrid(config: Any) -> bool:
    """Whether all its layers are of the two supported kinds, some of them attend, and nothing bounds the time
    steps: transformers' decodes would ignore such bounds."""
    kinds = set(config.layer_types)
    known = {"linear_attention", "full_attention"}
    is_known = "full_attention" in kinds and known >= kinds
    return config.hidden_act == "silu" and is_known and scans_every_step(config)


def scans_every_step(config: Any) -> bool:
    """Whether nothing bounds the time steps of Mamba layers."""
    return tuple(config.time_step_limit or _EVERY_STEP) == _EVERY_STEP


def granite_hybrid_shape(config: Any) -> DecoderShape:
    plain = scaled_shape(config)
    mamba = mamba_shape(config)
    states = tuple(mamba if kind == "linear_attention" else None for kind in config.layer_types)
    return replace(
        plain,
        windows=(None,) * states.count(None),
        states=states,
        mlps=(_mlp_shape(config),) * plain.num_layers,
        has_rope=config.position_embedding_type == "rope",
        other_names=_OTHER_NAMES,
    )


def mamba_shape(config: Any) -> MambaShape:
    return MambaShape(
        config.mamba_n_heads,
        config.mamba_d_head,
        config.mamba_n_groups,
        config.mamba_d_state,
        config.mamba_d_conv,
        bool(config.mamba_conv_bias),
        bool(config.mamba_proj_bias),
    )


def _mlp_shape(config: Any) -> MLPShape:
    if not config.num_local_experts:
        return DenseShape(config.shared_intermediate_size, joined=True)
    routing = chosen_softmax(config)
    return SparseShape(
        config.intermediate_size, routing, config.shared_intermediate_size, names=_EXPERT_NAMES
    )

"""Nemotron-H and Nemotron 3: layers of one kind each, Mamba-2, attention without positions, an MLP or
experts, both with squares in place of gates. The layers for multi-token prediction are not used.

Time steps have no lower bound, as in NVIDIA's own code; transformers bounds those of prompts, but not those
of decodes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from engine.worker.models.families.glm4_moe import sigmoid_routing
from engine.worker.models.families.plain import plain_shape
from engine.worker.models.mixers.state_shapes import MambaShape
from engine.worker.models.shape import (
    NO_ROPE,
    DecoderShape,
    DenseShape,
    ExpertNames,
    MLPShape,
    SparseShape,
)

_MIXER = "mixer."
_NAMES = (
    *((f"{norm}.", "norm.") for norm in ("input_layernorm", "post_attention_layernorm")),
    *((part, _MIXER) for part in ("self_attn.", "mamba.")),
)
_EVERY_STEP = (0.0, math.inf)
_KINDS = {"linear_attention", "full_attention", "mlp", "moe"}


def is_known_nemotron_h(config: Any) -> bool:
    """Whether some layers attend, all are of known kinds, time steps are unbounded, and experts have no
    biases."""
    kinds = set(config.layers_block_type)
    limits = tuple(config.time_step_limit or _EVERY_STEP)
    return (
        "full_attention" in kinds
        and kinds <= _KINDS
        and (config.mlp_hidden_act, config.mamba_hidden_act) == ("relu2", "silu")
        and limits == _EVERY_STEP
        and not (config.mlp_bias and "moe" in kinds)
        and not config.residual_in_fp32
        and config.sliding_window is None
    )


def nemotron_h_shape(config: Any) -> DecoderShape:
    kinds = config.layers_block_type
    mamba = MambaShape(
        config.mamba_num_heads,
        config.mamba_head_dim,
        config.n_groups,
        config.ssm_state_size,
        config.conv_kernel,
        bool(config.use_conv_bias),
        bool(config.use_bias),
    )
    mlps: dict[str, MLPShape] = {"mlp": _dense(config), "moe": _sparse(config)}
    return replace(
        plain_shape(config, "layer_norm_epsilon"),
        windows=(None,) * kinds.count("full_attention"),
        mlps=tuple(mlps.get(kind) for kind in kinds),
        mixes=tuple(kind not in mlps for kind in kinds),
        states=tuple(mamba if kind == "linear_attention" else None for kind in kinds),
        has_rope=False,
        rope_kinds=(NO_ROPE,) * len(kinds),
        mlp_prefix=_MIXER,
        other_names=_NAMES,
    )


def _dense(config: Any) -> DenseShape:
    return DenseShape(config.intermediate_size, bias=bool(config.mlp_bias), squared=True)


def _sparse(config: Any) -> SparseShape:
    return SparseShape(
        config.moe_intermediate_size,
        sigmoid_routing(config, config.n_routed_experts),
        config.moe_shared_expert_intermediate_size,
        names=ExpertNames(_MIXER),
        squared=True,
        latent_size=config.moe_latent_size or 0,
    )

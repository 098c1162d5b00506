"""Granite 3 and its mixtures of experts: factors of embeddings, residuals, scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import DecoderShape, DenseShape, ExpertNames, Routing, SparseShape

NAMES = (
    ("mlp.gate.", "block_sparse_moe.router.layer."),
    ("mlp.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("mlp.experts.down_proj", "block_sparse_moe.output_linear.weight"),
    ("mlp.shared_experts.gate_up_proj.", "shared_mlp.input_linear."),
    ("mlp.shared_experts.down_proj.", "shared_mlp.output_linear."),
)
"""Names of tensors in Granite's checkpoints."""


def granite_shape(config: Any) -> DecoderShape:
    mlp = DenseShape(config.intermediate_size, bias=bool(config.mlp_bias))
    return replace(scaled_shape(config), mlps=(mlp,) * config.num_hidden_layers)


def granite_moe_shape(config: Any) -> DecoderShape:
    shared_size = getattr(config, "shared_intermediate_size", 0)
    names = ExpertNames(joined_share=True)
    sparse = SparseShape(config.intermediate_size, chosen_softmax(config), shared_size, names=names)
    mlps = (sparse,) * config.num_hidden_layers
    return replace(scaled_shape(config), mlps=mlps, other_names=NAMES)


def scaled_shape(config: Any) -> DecoderShape:
    """The plain shape with Granite's biases and factors."""
    biased = has_attention_bias(config)
    return replace(
        plain_shape(config),
        qkv_bias=biased,
        output_bias=biased,
        attention_scale=float(config.attention_multiplier),
        embedding_scale=float(config.embedding_multiplier),
        residual_scale=float(config.residual_multiplier),
        logit_divisor=float(config.logits_scaling),
    )


def chosen_softmax(config: Any) -> Routing:
    """A softmax over the chosen experts only, which equals a normalized softmax over all."""
    return Routing(config.num_local_experts, config.num_experts_per_tok, rounded=True)

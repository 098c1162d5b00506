"""gpt-oss: a sink per head, a window in every other layer, biases everywhere, and experts whose gates and ups
are clamped (arXiv:2508.10925)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.base import layer_windows
from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import ClampedGate, DecoderShape, ExpertNames, Routing, SparseShape

_CLAMPED = ClampedGate(alpha=1.702, limit=7.0)
"""The published gate, for configs of transformers before 5.18, which have no fields for it."""


def gpt_oss_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    biased = has_attention_bias(config)
    # Its softmax is over the chosen experts only, which equals a normalized softmax over all.
    routing = Routing(config.num_local_experts, config.num_experts_per_tok, biased=True, rounded=True)
    sparse = SparseShape(
        config.intermediate_size,
        routing,
        names=ExpertNames(router="router"),
        clamped=ClampedGate(
            getattr(config, "swiglu_alpha", _CLAMPED.alpha), getattr(config, "swiglu_limit", _CLAMPED.limit)
        ),
    )
    return replace(
        plain,
        qkv_bias=biased,
        output_bias=biased,
        sinks=True,
        windows=tuple(layer_windows(config)),
        mlps=(sparse,) * plain.num_layers,
    )

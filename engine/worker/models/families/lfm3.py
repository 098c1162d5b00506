"""LFM3: short convolutions, attention, and attention with a window, in turn; norms of outputs, and a gate for
each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.plain import plain_shape
from engine.worker.models.mixers.state_shapes import ShortConvShape
from engine.worker.models.shape import NO_ROPE, DecoderShape

_KINDS = {"full_attention", "sliding_attention", "conv"}
_NAMES = (
    ("input_layernorm.", "operator_norm."),
    ("post_attention_layernorm.", "post_operator_norm."),
    ("pre_feedforward_layernorm.", "ffn_norm."),
    ("post_feedforward_layernorm.", "post_ffn_norm."),
    ("mlp.gate_proj.", "feed_forward.w1."),
    ("mlp.up_proj.", "feed_forward.w3."),
    ("mlp.down_proj.", "feed_forward.w2."),
)


def is_known_lfm3(config: Any) -> bool:
    """Whether its layers are of the three kinds, some attend to everything, and outputs are normalized."""
    kinds = set(config.layer_types)
    return "full_attention" in kinds and kinds <= _KINDS and bool(config.use_sandwich_norm)


def lfm3_shape(config: Any) -> DecoderShape:
    kinds = config.layer_types
    conv = ShortConvShape(config.hidden_size, config.conv_L_cache, bool(config.conv_bias))
    biased = bool(config.attention_bias)
    windows = {"sliding_attention": config.sliding_window}
    return replace(
        plain_shape(config, "norm_eps"),
        windows=tuple(windows.get(kind) for kind in kinds if kind != "conv"),
        states=tuple(conv if kind == "conv" else None for kind in kinds),
        qkv_bias=biased,
        output_bias=biased,
        qk_norm=True,
        head_gates=bool(config.use_attention_gate),
        output_norms=True,
        wide_rope=True,
        rope_kinds=tuple(NO_ROPE if kind == "conv" else kind for kind in kinds),
        other_names=_NAMES,
    )

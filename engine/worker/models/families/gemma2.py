"""Gemma 2: soft caps, output norms, and a window in every other layer (arXiv:2408.00118)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.worker.models.base import layer_windows
from engine.worker.models.families.plain import has_attention_bias, plain_shape
from engine.worker.models.shape import DecoderShape, DenseShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def gemma2_shape(config: Any) -> DecoderShape:
    plain = plain_shape(config)
    biased = has_attention_bias(config)
    return replace(
        plain,
        qkv_bias=biased,
        output_bias=biased,
        windows=tuple(layer_windows(config)),
        mlps=(DenseShape(config.intermediate_size, by_gelu=True),) * plain.num_layers,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_cap=config.attn_logit_softcapping,
        logit_cap=config.final_logit_softcapping,
        centered_norms=True,
        output_norms=True,
        embedding_scale=config.hidden_size**0.5,
    )


def is_known_gemma(config: PreTrainedConfig) -> bool:
    """Whether a Gemma has the supported activation and mask."""
    bidirectional = getattr(config, "use_bidirectional_attention", None)
    return getattr(config, "hidden_activation", None) == "gelu_pytorch_tanh" and not bidirectional

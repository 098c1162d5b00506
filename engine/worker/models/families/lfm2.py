"""LFM2 and its mixture of experts: short convolutions in most layers, attention with norms of heads in the
others, and an MLP or experts with a sigmoid router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.mixers.state_shapes import ShortConvShape
from engine.worker.models.shape import DecoderShape, DenseShape, ExpertNames, Routing, SparseShape

_NAMES = (
    ("input_layernorm.", "operator_norm."),
    ("post_attention_layernorm.", "ffn_norm."),
    ("self_attn.o_proj.", "self_attn.out_proj."),
    ("self_attn.q_norm.", "self_attn.q_layernorm."),
    ("self_attn.k_norm.", "self_attn.k_layernorm."),
    ("mlp.gate_proj.", "feed_forward.w1."),
    ("mlp.up_proj.", "feed_forward.w3."),
    ("mlp.down_proj.", "feed_forward.w2."),
    ("feed_forward.gate.e_score_correction_bias", "feed_forward.expert_bias"),
)


def is_known_lfm2(config: Any) -> bool:
    """Whether its layers are of the two kinds, and some attend."""
    kinds = set(config.layer_types)
    return "full_attention" in kinds and kinds <= {"full_attention", "conv"}


def is_known_lfm2_moe(config: Any) -> bool:
    return is_known_lfm2(config) and bool(config.use_expert_bias)


def lfm2_shape(config: Any) -> DecoderShape:
    conv = ShortConvShape(config.hidden_size, config.conv_L_cache, bool(config.conv_bias))
    states = tuple(conv if kind == "conv" else None for kind in config.layer_types)
    return DecoderShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.norm_eps,
        tied=bool(config.tie_word_embeddings),
        windows=(None,) * states.count(None),
        mlps=(DenseShape(_inner_size(config)),) * len(states),
        states=states,
        qk_norm=True,
        other_names=_NAMES,
    )


def lfm2_moe_shape(config: Any) -> DecoderShape:
    plain = lfm2_shape(config)
    routing = Routing(
        config.num_experts,
        config.num_experts_per_tok,
        normalized=bool(config.norm_topk_prob),
        by_sigmoid=True,
        scale=config.routed_scaling_factor,
    )
    names = ExpertNames("feed_forward.", gate="w1", up="w3", down="w2")
    sparse = SparseShape(config.moe_intermediate_size, routing, names=names)
    mlps = (mlp if index < config.num_dense_layers else sparse for index, mlp in enumerate(plain.mlps))
    return replace(plain, mlps=tuple(mlps))


def _inner_size(config: Any) -> int:
    """The intermediate size, which LFM2 may compute from that of its config."""
    size: int = config.intermediate_size
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return size
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    size = int(config.block_ffn_dim_multiplier * size)
    multiple: int = config.block_multiple_of
    return -(-size // multiple) * multiple

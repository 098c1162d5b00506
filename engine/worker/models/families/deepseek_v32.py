"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer, which chooses the tokens that each query attends to.
In GLM-5.1 and later, some layers attend to what the last indexer before them has chosen. The layers for
multi-token prediction are not used."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.worker.models.families.deepseek_v2 import latent_decoder
from engine.worker.models.families.glm4_moe import sigmoid_routing
from engine.worker.models.families.plain import mlps_by_kind, names_mlps, plain_shape
from engine.worker.models.shape import DecoderShape, IndexShape

_KINDS = {"full", "shared"}


def is_known_deepseek_v32(config: Any) -> bool:
    """Whether all layers have an indexer, or share one, and all heads have keys of their own."""
    kinds = _index_kinds(config)
    return (
        names_mlps(config)
        and config.num_key_value_heads == config.num_attention_heads
        and config.q_lora_rank is not None
        and not config.mlp_bias
        and kinds[0] == "full"
        and set(kinds) <= _KINDS
        and set(config.layer_types) == {"indexed_attention"}
    )


def deepseek_v32_shape(config: Any) -> DecoderShape:
    return _indexed_decoder(config, interleaved=False)


def glm_moe_dsa_shape(config: Any) -> DecoderShape:
    return _indexed_decoder(config, interleaved=True)


def _indexed_decoder(config: Any, *, interleaved: bool) -> DecoderShape:
    """The shape; ``interleaved``: whether the numbers of pairs that the indexer rotates are neighbors."""
    shape = latent_decoder(config, sigmoid_routing(config, config.n_routed_experts), interleaved=True)
    assert shape.latent is not None
    index = IndexShape(config.index_n_heads, config.index_head_dim, config.index_topk, interleaved)
    latent = replace(shape.latent, index=index)
    return replace(
        shape,
        head_dim=latent.latent_size,
        latent=latent,
        mlps=mlps_by_kind(config, plain_shape(config).mlps, sparse=shape.mlps[-1]),
        indexes=tuple(kind == "full" for kind in _index_kinds(config)),
    )


def _index_kinds(config: Any) -> list[str]:
    return getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers

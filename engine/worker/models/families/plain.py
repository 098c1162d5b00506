"""The shape that all families start from: no biases, no head norms, full attention, dense MLPs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.worker.models.shape import DecoderShape, DenseShape, MLPs, MLPShape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def plain_shape(config: PreTrainedConfig, norm_eps: str = "rms_norm_eps") -> DecoderShape:
    """Read the fields that mean the same in every family. A config may have fields of other families, too,
    but only those that its own code reads count, so the family's module reads the rest. ``norm_eps``: the
    field that has the epsilon of norms."""
    num_layers = config.num_hidden_layers
    return DecoderShape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=getattr(config, norm_eps),
        tied=bool(config.tie_word_embeddings),
        windows=(None,) * num_layers,
        mlps=(DenseShape(getattr(config, "intermediate_size", 0)),) * num_layers,
    )


def mlps_by_kind(config: Any, dense: MLPs, sparse: MLPShape | None) -> MLPs:
    """The MLP of each layer, where the config names those with experts."""
    kinds = zip(config.mlp_layer_types, dense, strict=True)
    return tuple(sparse if kind == "sparse" else mlp for kind, mlp in kinds)


def names_mlps(config: Any) -> bool:
    """Whether the config asks for SiLU and for no other kinds of MLPs."""
    return config.hidden_act == "silu" and set(config.mlp_layer_types) <= {"dense", "sparse"}


def has_attention_bias(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "attention_bias", False))

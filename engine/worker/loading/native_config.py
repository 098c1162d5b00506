"""Reads the fields of a model's config.json that the native decoder needs, without transformers, whose config
classes import its modeling code and half of torch: 150 MB and seconds.

Accepts a config only if it knows every field; transformers handles all others, and all invalid configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec

_Size = Annotated[int, msgspec.Meta(gt=0)]

_WITHOUT_BEARING = frozenset(
    (
        *("_name_or_path", "transformers_version", "use_cache", "pretraining_tp", "initializer_range"),
        *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers"),
        *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    )
)
"""Fields that do not change what a decoder computes; the API server handles end-of-sequence tokens."""
_RENAMED = {"torch_dtype": "dtype", "rope_scaling": "rope_parameters"}
"""Older field names; if both are present, transformers decides."""
_ROPE_NUMBERS: Mapping[str, frozenset[str]] = {
    "default": frozenset(("rope_theta",)),
    "linear": frozenset(("rope_theta", "factor")),
    "llama3": frozenset(
        (
            *("rope_theta", "factor", "low_freq_factor", "high_freq_factor"),
            "original_max_position_embeddings",
        )
    ),
}
"""The numeric fields of each rope type."""
_DEFAULT_ROPE_THETA = 10_000.0
_ROPE_THETAS = {"mixtral": 1_000_000.0}
"""Defaults of families that differ."""
_PARTIAL_ROPE = "partial_rotary_factor"
_REQUIRED = {"mistral": "sliding_window", "qwen3": "head_dim"}
"""Fields that must be present, because the family's default differs from the native one."""


class NativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Replaces a ``PreTrainedConfig``: has the same field names and values."""

    model_type: Literal["llama", "mistral", "qwen2", "qwen3"]
    hidden_act: Literal["silu"]
    vocab_size: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size
    max_position_embeddings: _Size
    rms_norm_eps: float
    rope_parameters: dict[str, str | float]
    architectures: list[str] | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    head_dim: _Size | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: _Size | None = None
    layer_types: list[Literal["full_attention"]] | None = None

    def get_text_config(self, decoder: bool = False) -> Self:
        """Like ``PreTrainedConfig.get_text_config``; the native decoder has only text."""
        return self


class Qwen3MoeConfig(NativeConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A NativeConfig of Qwen3-MoE."""

    model_type: Literal["qwen3_moe"]  # type: ignore[assignment]
    num_experts: _Size
    num_experts_per_tok: _Size
    moe_intermediate_size: _Size
    norm_topk_prob: bool
    decoder_sparse_step: _Size = 1
    mlp_only_layers: list[int] | None = None


class MixtralConfig(NativeConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A NativeConfig of Mixtral."""

    model_type: Literal["mixtral"]  # type: ignore[assignment]
    num_local_experts: _Size
    num_experts_per_tok: _Size


class Glm4MoeConfig(NativeConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A NativeConfig of GLM-4.5 and its successors."""

    model_type: Literal["glm4_moe"]  # type: ignore[assignment]
    n_routed_experts: _Size
    n_shared_experts: _Size
    num_experts_per_tok: _Size
    moe_intermediate_size: _Size
    first_k_dense_replace: int
    norm_topk_prob: bool
    n_group: _Size
    topk_group: _Size
    routed_scaling_factor: float
    use_qk_norm: bool
    num_nextn_predict_layers: int = 1


_STRUCTS: Mapping[str, type[NativeConfig]] = {
    "qwen3_moe": Qwen3MoeConfig,
    "mixtral": MixtralConfig,
    "glm4_moe": Glm4MoeConfig,
}
"""The families with additional fields."""


def native_config(raw: Mapping[str, Any]) -> NativeConfig | None:
    """Parse the fields of a config.json; None if transformers must read it."""
    fields = {name: value for name, value in raw.items() if name not in _WITHOUT_BEARING}
    for old, new in _RENAMED.items():
        if old in fields and fields.setdefault(new, fields[old]) is not fields.pop(old):
            return None
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or _REQUIRED.get(model_type, "model_type") not in fields:
        return None
    if fields.pop("use_sliding_window", False) is not False:
        return None
    if model_type.startswith("qwen"):  # the window applies only if use_sliding_window is set
        fields.pop("sliding_window", None)
    if model_type == "qwen3_moe" and "num_local_experts" in fields:  # transformers 5 writes this name
        fields.setdefault("num_experts", fields.pop("num_local_experts"))
    fields["rope_parameters"] = _rope_parameters(
        model_type, fields.pop("rope_theta", None), fields.get("rope_parameters")
    )
    if model_type == "glm4_moe" and fields["rope_parameters"] is not None:
        share = fields.pop(_PARTIAL_ROPE, 0.5)
        fields["rope_parameters"].setdefault(_PARTIAL_ROPE, share)
    try:
        config = msgspec.convert(fields, _STRUCTS.get(model_type, NativeConfig))
    except msgspec.ValidationError:
        return None
    return config if _is_valid(config) else None


def _rope_parameters(model_type: str, theta: Any, given: Any) -> dict[str, Any] | None:
    """Return the rope parameters with type and theta, whichever form the config uses; None if they are not
    supported here."""
    if given is not None and not isinstance(given, dict):
        return None
    rope = dict(given or {})
    default_theta = _ROPE_THETAS.get(model_type, _DEFAULT_ROPE_THETA)
    rope.setdefault("rope_theta", default_theta if theta is None else theta)
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.pop("type", None)
    rope_type = rope["rope_type"]
    numbers = {name: value for name, value in rope.items() if name != "rope_type"}
    known = numbers.keys() - {_PARTIAL_ROPE} if model_type == "glm4_moe" else numbers.keys()
    if not isinstance(rope_type, str) or known != _ROPE_NUMBERS.get(rope_type):
        return None
    return rope if all(type(value) in (int, float) for value in numbers.values()) else None


def _is_valid(config: NativeConfig) -> bool:
    """Whether transformers would accept it."""
    head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
    divides = config.hidden_size % config.num_attention_heads == 0
    return (
        (divides or (config.head_dim is not None and isinstance(config, Glm4MoeConfig)))
        and head_dim % 2 == 0
        and (config.layer_types is None or len(config.layer_types) == config.num_hidden_layers)
    )
